"""The built-in texts."""

SENTENCES = (
    "Attention.",
    "It rained all night.",
    "Two keys, one lock, and nobody remembers which of the keys turns it.",
    "The ferry leaves at seven in the morning, unless the fog is thicker than the captain's patience.",
    "Why does the kettle sing just before the water boils, and fall silent again once it does?",
    "A cache is a bet on the future: whatever is kept costs room today, and pays only if somebody asks for it again "
    "tomorrow. Most of the art lies in guessing what will be asked for, and in keeping it small enough that a wrong "
    "guess does little harm.",
    "In the village they still tell of the winter when the mill wheel froze. For nine days no flour was ground, and on "
    "the tenth the miller's daughter lit a ring of small fires on the ice around the wheel. By noon it creaked, by "
    "evening it turned, and the first sack went to the woodcutter who had lent her his last dry logs. Nobody wrote any "
    "of this down. It has been told so often that the fires have grown into bonfires and the daughter into a giant, "
    "but the wheel is still there, and one of its paddles is black along the edge.",
    "To read a long page, one does not weigh every word against every other word. The eye jumps: it rests on a name, "
    "skips a line, goes back to the verb that it had missed, and by the end of the paragraph it has visited a small "
    "part of what is printed there. A machine that reads by attention is more thorough and less clever. For each word "
    "it asks all the others how much they matter, turns the answers into shares of one whole, and takes that mixture "
    "as the meaning of the word in this place. The asking is cheap and the shares are cheap; what is dear is carrying "
    "all the words past the reader, again and again, once for each new word that is written. So the people who build "
    "such machines think less about arithmetic than about haulage. They store the words in fewer bits, they cut the "
    "page into pieces that many readers carry at once, and they add up what the readers report in such a way that the "
    "sum is what one patient reader would have said. If all goes well, nobody can tell the difference except by the "
    "clock.",
)
"""Sentences of very different lengths, for the embeddings."""

PASSAGE = (
    "The harbour library keeps its catalogue on paper cards, in forty oak drawers along the north wall. Each card has "
    "a short line at the top, by which it is found, and a longer note below, which is what the visitor has come for. "
    "When somebody asks a question, the librarian does not fetch the one card that fits. She runs a thumb along every "
    "drawer, reads the short lines, and decides for each how well it answers what was asked. Most of them she hardly "
    "looks at. A few she pulls out halfway, and one or two she lays on the desk. Then she writes a reply that leans on "
    "all of them at once, each in proportion to how well its line had matched, so that a card which fits twice as well "
    "speaks twice as loudly, and a card which does not fit at all is silent. The reply itself becomes a new card, with "
    "a line and a note of its own, and goes into the last drawer before the next question is heard. "
    "For years this worked, because the town was small and its questions were few. Then the port grew. There were so "
    "many cards that walking along the drawers took longer than writing the reply, and the librarian noticed that her "
    "feet, not her head, set the pace. She tried three remedies. First she had the notes copied in a tiny hand, so "
    "that four cards went where one had been; now and then a letter was misread, but the sense of a reply hardly ever "
    "changed. Next she gave up keeping each visitor's cards together, and put new ones wherever a drawer had room, "
    "with a slip on the desk that said which drawers to visit and in what order; not a single place stayed empty after "
    "that. Last of all she asked her neighbours to help. Each walked along a part of the wall and came back with a "
    "small reply and a number that said how much it ought to count, and she blended the small replies by these "
    "numbers. To her surprise the blend was the very reply that she would have written alone, down to the last comma. "
    "It was only much sooner on the desk."
)
"""A text for the KV cache."""
