"""On several ranks a restore sees the saves that are under way, too: rank 0 names a step when its own are decided."""

import pytest

# Step 1 is committed, and step 2 is under way when all ranks restore.
BEGUN = """
import warnings
from async_ckpt.core.ranks import meeting
from async_ckpt.core.saving import ledger

def state(step):
    return {"whole": torch.full((300, 1000), float(step)), "step": step}

def restored(**how):
    live = state(9)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        step = ckpt.restore(live, **how)
    here.tell([step, live["step"], bool((live["whole"] == float(live["step"])).all()), sum("step 2" in str(one.message) for one in told)])

def says_when_it_waits(begun, *rest):
    if begun:
        here.say(f"waits-{here.rank}")
    return real(begun, *rest)

real, ledger.wait_for_decisions = ledger.wait_for_decisions, says_when_it_waits
ckpt = open_run(here.root)
ckpt.save(state(1), 1).result()
here.meet("begun")
"""
END = """
here.tell(ckpt.latest())
try:
    ckpt.close()
except Exception as error:
    here.tell(type(error).__name__)
"""


@pytest.mark.parametrize("how", ["", "fallback=True", "step=2"])
def test_all_ranks_restore_the_step_that_they_are_just_saving(worlds, how):
    script = f"""{BEGUN}
if here.rank == 1:
    here.at("receipt", lambda: here.hear("waits-0", "waits-1"), step=2)
ckpt.save(state(2), 2)
restored({how})
{END}"""
    assert [one.told for one in worlds.run(2, script)] == [[[2, 2, True, 0], 2]] * 2


def test_all_ranks_restore_the_step_before_one_that_fails_on_one_of_them(worlds):
    script = f"""{BEGUN}
if here.rank == 1:
    here.at("write", lambda: (here.hear("waits-0"), here.fail(OSError("gone"))), step=2)
ckpt.save(state(2), 2)
restored()
{END}"""
    ends = [one.told for one in worlds.run(2, script)]
    assert [told[:2] for told in ends] == [[[1, 1, True, 1], 1]] * 2
    assert ends[0][2] == "PeerFailedError"
    assert len(ends[1]) == 3


def test_where_the_save_of_rank_0_takes_long_a_rank_whose_own_has_failed_waits_on_for_its_word(worlds):
    """A clock on which more time goes by at each sign of rank 0's than a rank waits for two."""
    script = f"""{BEGUN}
if here.rank == 0:
    meeting.SIGN_SECONDS = 0.0
    here.at("write", lambda: here.hear("has waited"), step=2)
else:
    heard, signs = meeting.Talk._has_signed, 0
    def count(self):
        global signs
        found = heard(self)
        signs += found
        if signs == 4:
            here.say("has waited")
        return found
    meeting.Talk._has_signed = count
    meeting._LOOK_AROUND_SECONDS, meeting.monotonic = -1.0, lambda: 0.8 * meeting.PEER_CALL_SECONDS * signs
    here.at("write", lambda: here.fail(OSError("gone")), step=2)
ckpt.save(state(2), 2)
restored()
here.tell(here.is_said("has waited"))
{END}"""
    ends = [one.told for one in worlds.run(2, script)]
    assert [told[:3] for told in ends] == [[[1, 1, True, 1], True, 1]] * 2


def test_where_rank_0_is_interrupted_while_it_waits_the_others_are_told(worlds):
    script = f"""{BEGUN}
if here.rank == 0:
    here.at("write", lambda: here.hear("told"), step=2)
    def interrupted(*_):
        raise KeyboardInterrupt
    ledger.wait_for_decisions = interrupted
    ckpt.save(state(2), 2)
    try:
        ckpt.restore(state(9))
    except KeyboardInterrupt:
        here.tell("interrupted")
    ledger.wait_for_decisions = real
else:
    here.at("write", lambda: here.fail(OSError("gone")), step=2)
    ckpt.save(state(2), 2)
    try:
        restored()
    except Exception as error:
        here.tell([type(error).__name__, "KeyboardInterrupt" in str(error)])
    here.say("told")
here.meet("told both")
restored()
{END}"""
    first, second = (one.told for one in worlds.run(2, script))
    assert first[0] == "interrupted"
    assert second[0] == ["PeerFailedError", True]
    assert first[1][:3] == second[1][:3] == [1, 1, True]
