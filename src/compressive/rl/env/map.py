"""The map of DMLab-30's rooms_select_nonmatching_object in Quake units. Both rooms have coordinates on one map.

Only facts are taken from the original. The corridor is our addition: it is used only with a delay, and is not connected
to the rooms.
"""

from typing import NamedTuple


class Box(NamedTuple):
    """An axis-aligned rectangle."""

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
"""Positions of the object in the first room: left or right, seen from the spawn point."""
EXAMPLE_GUARD = 32.0
"""Half the side of the invisible, solid box around that object."""
CHOICES = ((600.0, 64.0), (600.0, -192.0))
"""Positions of the two objects in the second room, left and right."""
REACH_BEFORE, REACH_BEHIND, REACH_ASIDE = 50.0, 44.0, 36.0
"""Distances before, behind and beside an object within which it is picked up."""

AVATAR = 15.0
"""Half the width of the avatar."""
EYE, WALL = 50.0, 128.0
"""Heights of the eye and of the walls."""
OBJECT_LIFT = 6.0
"""Distance between the floor and an object."""

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
"""All walls: first those of constant x, then those of constant y."""
