"""Other libraries on this library's attention; each module needs the library it is named after."""
