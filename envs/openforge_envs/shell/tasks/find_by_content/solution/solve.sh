grep -l {{needle}} *.md > {{target}}
