"""What MAVL's figures show, as far as they are printed."""

# Figure 5's knowledge, the parts that it leaves out (xxxxxx) aside: a block for each key word.
FIGURE_5 = (
    "A snowboarder is a person who rides a snowboard. Snowboarding is a winter sport that involves "
    "riding down a snow-covered slope on a snowboard.",
    "A powdery slope is a snow-covered slope that is covered in powder, or loose snow. Powdery "
    "slopes are often found in ski resorts, where skiers and snowboarders can ride down them.",
    "A sunny day is a day with clear skies and bright sunshine. Sunny days are often associated "
    "with warm weather, and are a common sight in the summer.",
)
