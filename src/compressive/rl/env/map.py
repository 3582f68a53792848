"""Where things are, in Quake units, as in DMLab-30's rooms_select_nonmatching_object; both rooms lie on one map.

Facts alone are taken from the original. The corridor is ours: it exists only with a delay, and lies apart.
"""

from typing import NamedTuple


class Box(NamedTuple):
    """A rectangle along the axes."""

    left: float
    right: float
    bottom: float
    top: float


FIRST_ROOM = Box(-256, 128, -256, 128)
VESTIBULE = Box(256, 384, -128, 0)
HALL = Box(384, 640, -248, 128)
CORRIDOR = Box(768, 1280, -128, 0)
PAD = Box(40, 88, -88, -40)

SPAWN = (-232.0, -64.0)
ARRIVAL = (288.0, -64.0)
CORRIDOR_ENTRY = (800.0, -64.0)
EXAMPLES = ((40.0, 64.0), (40.0, -192.0))
"""Where the first room shows its object: left or right of someone who comes in."""
EXAMPLE_GUARD = 32.0
"""Half the side of the invisible box around it, which cannot be entered."""
CHOICES = ((600.0, 64.0), (600.0, -192.0))
"""Where the second room shows its two, left and right."""
REACH_BEFORE, REACH_BEHIND, REACH_ASIDE = 50.0, 44.0, 36.0
"""An object is picked up from so far before, behind and beside it."""

PLAYER = 15.0
"""Half the width of the player."""
EYE, WALL = 50.0, 128.0
"""Heights of the eye and of walls."""
OBJECT_LIFT = 6.0
"""How far above the floor an object hovers."""

FACES = (  # (constant, from, to)
    (
        (FIRST_ROOM.left, FIRST_ROOM.bottom, FIRST_ROOM.top),
        (FIRST_ROOM.right, FIRST_ROOM.bottom, FIRST_ROOM.top),
        (VESTIBULE.left, VESTIBULE.bottom, VESTIBULE.top),
        (HALL.left, HALL.bottom, VESTIBULE.bottom),
        (HALL.left, VESTIBULE.top, HALL.top),
        (HALL.right, HALL.bottom, HALL.top),
        (CORRIDOR.left, CORRIDOR.bottom, CORRIDOR.top),
        (CORRIDOR.right, CORRIDOR.bottom, CORRIDOR.top),
    ),
    (
        (FIRST_ROOM.bottom, FIRST_ROOM.left, FIRST_ROOM.right),
        (FIRST_ROOM.top, FIRST_ROOM.left, FIRST_ROOM.right),
        (VESTIBULE.bottom, VESTIBULE.left, VESTIBULE.right),
        (VESTIBULE.top, VESTIBULE.left, VESTIBULE.right),
        (HALL.bottom, HALL.left, HALL.right),
        (HALL.top, HALL.left, HALL.right),
        (CORRIDOR.bottom, CORRIDOR.left, CORRIDOR.right),
        (CORRIDOR.top, CORRIDOR.left, CORRIDOR.right),
    ),
)
"""All walls: those of constant x, then those of constant y."""
