# What this autograder grades: other chapters in a submission count nothing.
CHAPTERS="{chapter}"
# Seconds for all checks of a submission together. Gradescope ends the whole run after 10 minutes
# unless its own setting is changed; reading, reports and sentences take up to two of them.
SUBMISSION_SECONDS=420
# Seconds for one check; a slow one has six times as long.
CHECK_SECONDS=30
