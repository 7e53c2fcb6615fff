awk '{ sum += $1 } END { print sum }' {{source}} > {{target}}
