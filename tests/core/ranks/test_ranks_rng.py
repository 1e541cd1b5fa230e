"""Random states in a world of another size: each rank takes those of its number modulo the saved world, and that is said once."""

import pytest

_SAVES = """
torch.manual_seed(10 + here.rank)
with open_run(here.root) as ckpt:
    ckpt.save({"whole": numbered(3), "more": {"rng": async_ckpt.RngState()}}, 1).result()
here.tell(torch.rand(3).tolist())
"""
_RESTORES = """
import warnings
with warnings.catch_warnings(record=True) as caught, open_run(here.root) as ckpt:
    warnings.simplefilter("always")
    ckpt.restore({"whole": numbered(3), "more": {"rng": async_ckpt.RngState()}}, **OPTIONS)
here.tell({"drawn": torch.rand(3).tolist(), "warned": [str(one.message) for one in caught if "random" in str(one.message)]})
"""


@pytest.mark.parametrize("size", [1, 2, 4, 6])
def test_each_rank_takes_the_random_state_of_its_number_modulo_the_saved_world(worlds, size):
    drawn = [one.told[0] for one in worlds.run(4, "import async_ckpt\n" + _SAVES)]
    ended = worlds.run(size, "import async_ckpt\nOPTIONS = {}\n" + _RESTORES)

    assert [one.told[0]["drawn"] for one in ended] == [drawn[rank % 4] for rank in range(size)]
    warned = [one.told[0]["warned"] for one in ended]
    if size == 4:
        assert warned == [[]] * 4
    else:
        assert warned[1:] == [[]] * (size - 1)
        (text,) = warned[0]
        assert text.startswith(f"step 1 was saved by 4 ranks, and is restored by {size}: for more.rng, rank n takes")


def test_a_rank_that_is_chosen_goes_before(worlds):
    drawn = [one.told[0] for one in worlds.run(3, "import async_ckpt\n" + _SAVES)]
    ended = worlds.run(2, "import async_ckpt\nOPTIONS = {'from_ranks': {'more.rng': 2}}\n" + _RESTORES)

    assert [one.told[0] for one in ended] == [{"drawn": drawn[2], "warned": []}] * 2
