"""Prose with people, things and places that a reader must keep track of.

The one idea: a story is a small simulated world told sentence by sentence. Who holds what, who is
where, whose it is and what it looks like is said once and needed again much later, so a model that
attends over the whole story predicts it better than one that knows the last few words.
"""

from __future__ import annotations

from collections.abc import Callable

from oasis_eval.minicorpus.chance import Chance, Split, split_of
from oasis_eval.minicorpus.words import COLOURS, MOODS, PEOPLE, PLACES, THINGS, WEATHER, Person

_FEWEST_EVENTS, _MOST_EVENTS = 12, 44
_TIMES = ("morning", "afternoon", "evening")
_GOING = ("went", "walked", "ran")


def story(chance: Chance, split: Split) -> str:
    """Return one story of about 100 to 400 words.

    Args:
        chance: Where its choices come from.
        split: Its opening (who is where with what) belongs to this split and so to no other: two
            splits have no story in common.
    """
    while True:
        world = _World(chance)
        if split_of(world.opening) == split:
            return world.tell(chance.between(_FEWEST_EVENTS, _MOST_EVENTS))


class _World:
    """People, things and places, and what has been told of them."""

    def __init__(self, chance: Chance) -> None:
        self.chance = chance
        self.people: list[Person] = chance.some(PEOPLE, chance.between(2, 4))
        self.places: list[str] = chance.some(PLACES, chance.between(3, 4))
        self.things: list[str] = chance.some(THINGS, chance.between(2, 4))
        self.where: dict[Person, str] = {who: chance.pick(self.places) for who in self.people}
        self.colour: dict[str, str] = {thing: chance.pick(COLOURS) for thing in self.things}
        self.owner: dict[str, Person] = {thing: chance.pick(self.people) for thing in self.things}
        self.mood: dict[Person, str] = {}
        self.place: dict[str, str] = {}
        """Of things that nobody holds."""
        self.holder: dict[str, Person] = {}
        self.last: Person | None = None
        """Whom a pronoun stands for."""
        self.opening = self._open()

    def tell(self, num_events: int) -> str:
        """Return the opening, that many events, and what has become of everything."""
        sentences = [self.opening]
        while len(sentences) <= num_events:
            if told := self.chance.pick(_EVENTS)(self):
                sentences.append(told)
        sentences.append(self._close())
        return " ".join(sentences)

    def _open(self) -> str:
        chance = self.chance
        first, *others = self.people
        told = [
            f"One {chance.pick(WEATHER)} {chance.pick(_TIMES)} {first.name} was in the "
            f"{self.where[first]}."
        ]
        for who in others:
            same = next((o for o in self.people if self.where[o] == self.where[who]), who)
            told.append(
                f"{who.name} was with {same.name}."
                if same is not who
                else f"{who.name} was in the {self.where[who]}."
            )
        for thing in self.things:
            what = f"{self.colour[thing]} {thing}"
            if chance.random() < 0.5:
                self.holder[thing] = chance.pick(self.people)
                told.append(f"{self.holder[thing].name} had a {what}.")
            else:
                self.place[thing] = chance.pick(self.places)
                told.append(f"There was a {what} in the {self.place[thing]}.")
            told.append(f"It belonged to {self.owner[thing].name}.")
        return " ".join(told)

    def _close(self) -> str:
        told = []
        for thing in self.things:
            what = f"the {self.colour[thing]} {thing} of {self.owner[thing].name}"
            where = self._whereabouts(thing)
            told.append(f"At the end {what} was {where}.")
        return " ".join(told)

    def _whereabouts(self, thing: str) -> str:
        if thing in self.holder:
            return f"with {self.holder[thing].name}"
        return f"in the {self.place[thing]}"

    def _subject(self, who: Person) -> str:
        """Name someone, or use the pronoun where the last sentence was about them."""
        known = who is self.last and self.chance.random() < 0.7
        self.last = who
        return who.subject if known else who.name

    def _held_by(self, who: Person) -> list[str]:
        return [thing for thing in self.things if self.holder.get(thing) is who]

    def _near(self, who: Person) -> list[str]:
        place = self.where[who]
        return [thing for thing in self.things if self.place.get(thing) == place]

    def _beside(self, who: Person) -> list[Person]:
        return [o for o in self.people if o is not who and self.where[o] == self.where[who]]

    # --- events: each returns its sentence, or nothing where it cannot happen ---------------------

    def go(self) -> str:
        who = self.chance.pick(self.people)
        elsewhere = [place for place in self.places if place != self.where[who]]
        self.where[who] = self.chance.pick(elsewhere)
        held = self._held_by(who)
        luggage = f" with the {self.chance.pick(held)}" if held else ""
        return f"{self._subject(who)} {self.chance.pick(_GOING)} to the {self.where[who]}{luggage}."

    def follow(self) -> str:
        who, whom = self.chance.some(self.people, 2)
        if self.where[who] == self.where[whom]:
            return ""
        self.where[who] = self.where[whom]
        subject = self._subject(who)
        return f"{subject} followed {whom.name} to the {self.where[who]}."

    def take(self) -> str:
        who = self.chance.pick(self.people)
        near = self._near(who)
        if not near:
            return ""
        thing = self.chance.pick(near)
        del self.place[thing]
        self.holder[thing] = who
        return f"{self._subject(who)} {self.chance.pick(('took', 'found'))} the {thing} there."

    def leave(self) -> str:
        who = self.chance.pick(self.people)
        held = self._held_by(who)
        if not held:
            return ""
        thing = self.chance.pick(held)
        del self.holder[thing]
        self.place[thing] = self.where[who]
        verb = self.chance.pick(("left", "hid", "dropped"))
        return f"{self._subject(who)} {verb} the {thing} in the {self.where[who]}."

    def give(self) -> str:
        who = self.chance.pick(self.people)
        held, beside = self._held_by(who), self._beside(who)
        if not held or not beside:
            return ""
        thing, whom = self.chance.pick(held), self.chance.pick(beside)
        self.holder[thing] = whom
        return f"{self._subject(who)} gave the {thing} to {whom.name}."

    def meet(self) -> str:
        who = self.chance.pick(self.people)
        beside = self._beside(who)
        if not beside:
            return ""
        subject, verb = self._subject(who), self.chance.pick(("saw", "thanked"))
        return f"{subject} {verb} {self.chance.pick(beside).name}."

    def feel(self) -> str:
        who = self.chance.pick(self.people)
        if who in self.mood and self.chance.random() < 0.5:
            return f"{self._subject(who)} was still {self.mood[who]}."
        self.mood[who] = self.chance.pick(MOODS)
        return f"{self._subject(who)} felt {self.mood[who]} now."

    def ask(self) -> str:
        who, whom = self.chance.some(self.people, 2)
        thing = self.chance.pick(self.things)
        self.last = None
        return (
            f"{who.name} asked where the {self.colour[thing]} {thing} was, "
            f"and {whom.name} knew that it was {self._whereabouts(thing)}."
        )

    def recall(self) -> str:
        thing = self.chance.pick(self.things)
        self.last = None
        if thing in self.holder:
            return f"{self.holder[thing].name} still had the {self.colour[thing]} {thing}."
        return f"The {thing} was still in the {self.place[thing]}."

    def describe(self) -> str:
        thing = self.chance.pick(self.things)
        self.last = None
        if self.chance.random() < 0.5:
            return f"The {thing} of {self.owner[thing].name} was {self.colour[thing]}."
        return f"The {self.colour[thing]} {thing} belonged to {self.owner[thing].name}."

    def stay(self) -> str:
        who = self.chance.pick(self.people)
        return f"{self._subject(who)} was still in the {self.where[who]}."


_EVENTS: tuple[Callable[[_World], str], ...] = (
    *(_World.go,) * 3,
    _World.follow,
    *(_World.take,) * 3,
    *(_World.leave,) * 2,
    *(_World.give,) * 3,
    _World.meet,
    _World.feel,
    _World.ask,
    _World.recall,
    _World.describe,
    _World.stay,
)
