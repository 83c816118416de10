"""Every spelling of replica groups (CASES R6, H1, H7)."""
import pytest

from jaxpara.hlo import HloError
from jaxpara.hlo.groups import flattened, group_size, groups, listed

SPELLINGS = {
    "{{0,1},{2,3}}": ((0, 1), (2, 3)),
    "{{0, 2}, {1, 3}}": ((0, 2), (1, 3)),
    "{}": (),
    "{{0},{1}}": ((0,), (1,)),
    "{{0,1,2},{3}}": ((0, 1, 2), (3,)),
    "[2,4]<=[8]": ((0, 1, 2, 3), (4, 5, 6, 7)),
    "[8,1]<=[8]": tuple((i,) for i in range(8)),
    "[1,8]<=[8]": (tuple(range(8)),),
    "[4,2]<=[2,4]T(1,0)": ((0, 4), (1, 5), (2, 6), (3, 7)),
    "[4,2]<=[2,2,2]T(1,0,2)": ((0, 1), (4, 5), (2, 3), (6, 7)),
    "[4,2]<=[2,2,2]T(2,1,0)": ((0, 4), (2, 6), (1, 5), (3, 7)),
    "mesh['stage'=2,'local'=4] {'stage'}": ((0, 4), (1, 5), (2, 6), (3, 7)),
    "mesh['stage'=2,'local'=4] {'local'}": ((0, 1, 2, 3), (4, 5, 6, 7)),
    "mesh['stage'=2,'local'=4] {'stage','local'}": (tuple(range(8)),),
    "mesh['stage'=2,'local'=4] {'local','stage'}": ((0, 4, 1, 5, 2, 6, 3, 7),),
    "mesh['axis_0'=1,'axis_1'=8] {'axis_1'}": (tuple(range(8)),),
    "mesh['axis_0'=1,'axis_1'=8] {'axis_0'}": tuple((i,) for i in range(8)),
    "mesh['a'=2,'b'=2,'c'=2] {'a','c'}": ((0, 1, 4, 5), (2, 3, 6, 7)),
    "mesh['axis_0'=2,'axis_1'=4], device_ids=([2,2,2]T(0,2,1)) {'axis_1':(2)2}": ((0, 2), (1, 3), (4, 6), (5, 7)),
    "mesh['axis_0'=2,'axis_1'=4], device_ids=([2,2,2]T(0,2,1)) {'axis_1':(1)2}": ((0, 1), (2, 3), (4, 5), (6, 7)),
    "mesh['a'=8] {'a':(2)2}": ((0, 2), (1, 3), (4, 6), (5, 7)),
    "mesh['a'=8] {'a':(1)2,'a':(4)2}": ((0, 1, 4, 5), (2, 3, 6, 7)),
    "mesh['a'=2,'b'=2], device_ids=(0,2,1,3) {'b'}": ((0, 2), (1, 3)),
    "mesh['a'=2,'b'=2], device_ids=(0,2,1,3) {'a'}": ((0, 1), (2, 3)),
    "mesh['a'=4,'b'=2], device_ids=([4,2]T(1,0)) {'a'}": ((0, 4, 1, 5), (2, 6, 3, 7)),
}


@pytest.mark.parametrize("text", SPELLINGS)
def test_spelling(text):
    assert groups(text) == SPELLINGS[text]


@pytest.mark.parametrize("text", ["[2,4]<=[9]", "range(8)", "mesh['a'=2] {'b'}", "mesh['a'=8] {'a':(3)2}", "mesh['a'=4], device_ids=(0,1,1,3) {'a'}",
                                  "mesh['a'=4]"])
def test_what_is_not_understood_is_an_error(text):
    with pytest.raises(HloError, match="replica_groups"):
        groups(text)


GLOBAL, NAMED, BARE = {"channel_id": "1", "use_global_device_ids": "true"}, {"channel_id": "1"}, {}


@pytest.mark.parametrize("found, attributes, kind, replicas, partitions, expected", [
    (((0, 1), (2, 3)), GLOBAL, "all-reduce", 1, 4, ((0, 1), (2, 3))),
    ((), GLOBAL, "all-reduce", 1, 4, ((0, 1, 2, 3),)),
    (((0,),), NAMED, "all-reduce", 1, 4, ((0, 1, 2, 3),)),              # one replica, and all partitions of it
    (((0,),), BARE, "all-reduce", 1, 4, ((0,), (1,), (2,), (3,))),      # every partition with itself
    ((), BARE, "all-reduce", 1, 4, ((0,), (1,), (2,), (3,))),
    ((), BARE, "all-reduce", 4, 1, ((0, 1, 2, 3),)),                    # pmap: replicas only
    (((0, 1),), BARE, "all-reduce", 2, 2, ((0, 2), (1, 3))),
    (((0, 1),), NAMED, "all-to-all", 2, 2, ((0, 1), (2, 3))),           # partitions, in each replica
    ((), NAMED, "all-to-all", 1, 4, ((0, 1, 2, 3),)),
    (((0, 1), (1, 0)), NAMED, "permute", 1, 2, ((0, 1), (1, 0))),
])
def test_what_the_numbers_mean(found, attributes, kind, replicas, partitions, expected):
    """CASES H7: group ids are not always replica ids."""
    assert flattened(found, attributes, kind, replicas, partitions) == expected


def test_sizes():
    assert listed("{{0,1},{1,2}}") == ((0, 1), (1, 2)) and listed("{}") == ()
    assert group_size(((0, 1, 2), (3,)), "all-reduce") == 3
    assert group_size(((0, 1), (1, 2), (2, 3), (4, 5)), "permute") == 4      # a chain of four, another of two
    assert group_size(((0, 0), (1, 1)), "permute") == 1
    assert group_size((), "permute") == 1
