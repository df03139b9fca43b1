"""Stories: what they say later follows from what they said before."""

from __future__ import annotations

import re

import pytest

from oasis_eval.minicorpus.chance import SPLITS, Chance, split_of
from oasis_eval.minicorpus.stories import story
from oasis_eval.minicorpus.words import COLOURS, PEOPLE

NAMES = "|".join(person.name for person in PEOPLE)
HUES = "|".join(COLOURS)


class Reader:
    """Reads a story sentence by sentence and objects to what cannot be."""

    def __init__(self) -> None:
        self.place: dict[str, str] = {}
        self.thing: dict[str, str] = {}
        self.colour: dict[str, str] = {}
        self.owner: dict[str, str] = {}
        self.mood: dict[str, str] = {}
        self.last_thing = self.last_person = ""
        self.num_checked = 0

    def read(self, text: str) -> None:
        for sentence in text.removesuffix(".").split(". "):
            self._sentence(re.sub(r"^(He|She)\b", self.last_person, sentence))

    def _same(self, found: str, known: str | None) -> None:
        assert found == known
        self.num_checked += 1

    def _whereabouts(self, thing: str, said: str) -> None:
        known = self.thing[thing]
        expected = f"with {known}" if known in self.place else f"in the {known}"
        self._same(said, expected)

    def _sentence(self, said: str) -> None:
        if match := re.match(rf"({NAMES}) ", said):
            self.last_person = match[1]
        who = self.last_person
        match said.split():
            case ["One", _, _, name, "was", "in", "the", place]:
                self.place[name] = place
            case [name, "was", "in", "the", place]:
                self.place[name] = place
            case [name, "was", "with", other]:
                self.place[name] = self.place[other]
            case [name, "had", "a", colour, thing]:
                self.thing[thing], self.colour[thing], self.last_thing = name, colour, thing
            case ["There", "was", "a", colour, thing, "in", "the", place]:
                self.thing[thing], self.colour[thing], self.last_thing = place, colour, thing
            case ["It", "belonged", "to", name]:
                self.owner[self.last_thing] = name
            case [_, "went" | "walked" | "ran", "to", "the", place]:
                assert self.place[who] != place
                self.place[who] = place
            case [_, "went" | "walked" | "ran", "to", "the", place, "with", "the", thing]:
                self._same(who, self.thing[thing])
                self.place[who] = place
            case [_, "followed", other, "to", "the", place]:
                self._same(place, self.place[other])
                self.place[who] = place
            case [_, "took" | "found", "the", thing, "there"]:
                self._same(self.place[who], self.thing[thing])
                self.thing[thing] = who
            case [_, "left" | "hid" | "dropped", "the", thing, "in", "the", place]:
                self._same(who, self.thing[thing])
                self._same(place, self.place[who])
                self.thing[thing] = place
            case [_, "gave", "the", thing, "to", other]:
                self._same(who, self.thing[thing])
                self._same(self.place[who], self.place[other])
                self.thing[thing] = other
            case [_, "saw" | "thanked", other]:
                self._same(self.place[who], self.place[other])
            case [_, "felt", mood, "now"]:
                self.mood[who] = mood
            case [_, "was", "still", "in", "the", place] if who == said.split(maxsplit=1)[0]:
                self._same(place, self.place[who])
            case ["The", thing, "was", "still", "in", "the", place]:
                self._same(place, self.thing[thing])
            case [_, "was", "still", mood]:
                self._same(mood, self.mood[who])
            case [_, "still", "had", "the", colour, thing]:
                self._same(who, self.thing[thing])
                self._same(colour, self.colour[thing])
            case ["The", thing, "of", name, "was", colour]:
                self._same(name, self.owner[thing])
                self._same(colour, self.colour[thing])
            case ["The", colour, thing, "belonged", "to", name]:
                self._same(name, self.owner[thing])
                self._same(colour, self.colour[thing])
            case [_, "asked", "where", "the", colour, thing, "was,", "and", _, "knew", *rest]:
                self._same(colour, self.colour[thing])
                self._whereabouts(thing, " ".join(rest).removeprefix("that it was "))
            case ["At", "the", "end", "the", colour, thing, "of", name, "was", *rest]:
                self._same(colour, self.colour[thing])
                self._same(name, self.owner[thing])
                self._whereabouts(thing, " ".join(rest))
            case _:
                pytest.fail(f"not understood: {said}")


@pytest.mark.parametrize("split", SPLITS)
def test_a_reader_who_keeps_track_is_never_contradicted(split: str) -> None:
    """Whoever holds, is, owns or looks as the text says, by a reader with no code of its."""
    for seed in range(150):
        reader = Reader()
        reader.read(story(Chance(f"reader {seed}"), split))  # type: ignore[arg-type]

        assert reader.num_checked >= 6


def test_stories_are_as_long_as_stated() -> None:
    """About 100 to 400 words."""
    lengths = [len(story(Chance(f"length {seed}"), "train").split()) for seed in range(400)]

    assert min(lengths) >= 90
    assert max(lengths) <= 450
    assert 220 < sum(lengths) / len(lengths) < 320


@pytest.mark.parametrize("split", SPLITS)
def test_the_opening_says_which_split(split: str) -> None:
    """Everything up to the last owner is in the hash, so an opening occurs in one split alone."""
    for seed in range(100):
        text = story(Chance(f"opening {seed}"), split)  # type: ignore[arg-type]
        end = re.match(rf".*\bIt belonged to (?:{NAMES})\.", text)
        assert end is not None

        assert split_of(end[0]) == split
