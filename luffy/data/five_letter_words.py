"""The words of the game `five_letters`, and the rule by which a guess is answered.

The words are Python code, not a data file, so that the fingerprint of a stage covers them.
"""

from collections import Counter

FIVE_LETTER_WORDS: tuple[str, ...] = tuple(
    """
level quiet white phase motor brush penny metal slice brand smoke pupil while linen pilot power hobby class logic
habit fable sleep giant drift eager video table crown water grape judge write total train glass alive blade break
staff night fifth robot cheer label bench index beast party apart piano diary feast later rival fever check drink
speak range quick heavy jelly greet fight coast final truck serve point local pearl right cabin trade merge robin
onion paint couch brief trend faith track grain dance crane hello front swing south empty dream uncle close laugh
panel labor force avoid cargo inner piece grant cheek craft admit scout torch paper bride knock vital pound apple
clean plate seven magic theme heart knife chair blood order shelf steam space plaza cover glory ridge allow bring
grand build pitch phone pride ocean mouse world happy angle match block maple issue solid elder owner mouth candy
mercy scene orbit actor drain relax rebel roast baker snake smart sauce crime photo limit outer cloud reply spice
ruler nerve chase crowd dress rider sheep whole stove thing fluid bound blame alarm fleet brown meter river image
sharp never major enemy every zebra price vivid porch cliff cause learn count shine delay elbow creek audio carry
daily drive forge blend prize berry color enjoy along draft nurse dairy sheet trial human thick earth chest realm
exist cable rapid spoon adult curve music taste small place store guide press guest flash being board arrow fence
great arise drama badge above wound trail movie route honor below aware lower money hotel stick usual clear fruit
chief argue broad model often beard chain agree laser plant apply blast bread offer light storm skill forty frame
catch plain brave ranch court floor about patch pasta treat shirt honey unity juice month whale toast melon round
queen guard radio shore royal title beach quest chess tower group upper funny medal ready charm award again youth
loose brook steel quilt event sweet green wheel watch wagon brain speed found harsh flame bunch civic dozen black
worth alike field eight proof sunny peace share clerk story cycle humor focus voice truth doubt ivory salad cheap
brick stage chalk stair extra input error boost album minor ideal loyal chart sugar start value crash shell print
spare woman proud aside fresh ahead tribe globe bless rural large stand noble mount anger agent comet asset house
cloth climb under frost clock armor other layer lucky young array think north stone prime claim sound mayor jewel
child wheat depth favor alert grace shade enter stamp coach today organ raise urban blind click thank begin eagle
ghost teach sport valid reach fancy graph union noise touch joint visit tiger guess adapt novel might awake after
coral cream lunch early lemon scale flour shape grass polar trust birth rough fifty short equal smile olive march
exact alone plane slope basic false horse blank grade
""".split()  # noqa: SIM905 - 484 quoted words would be no easier to read
)
"""Common English words in a fixed, mixed order: a game with few words takes the first ones."""


def feedback(guess: str, word: str) -> str:
    """Return a mark for each letter of the guess: `G` in its place, `Y` elsewhere in the word, `-` absent.

    A letter gets as many marks as the word has of it, those in place first and then from the left.

    Raises:
        ValueError: the lengths differ.
    """
    remaining = Counter(letter for letter, guessed in zip(word, guess, strict=True) if letter != guessed)
    marks = []
    for letter, guessed in zip(word, guess, strict=True):
        if letter == guessed:
            marks.append("G")
        elif remaining[guessed]:
            remaining[guessed] -= 1
            marks.append("Y")
        else:
            marks.append("-")
    return "".join(marks)
