#!/bin/sh
# Prints the extra for this machine's NVIDIA driver: cuda13 (driver 580 is the first for CUDA 13), cuda12, or nothing.
driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null) || exit 0
driver=${driver%%.*}
case $driver in
    '' | *[!0-9]*) ;;
    *) if [ "$driver" -ge 580 ]; then echo cuda13; else echo cuda12; fi ;;
esac
