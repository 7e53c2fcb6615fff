printf 'größe ✓ 1\ntwo\nthree\n' > notes.txt
