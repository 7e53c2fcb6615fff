grep -c "" {{name}}.txt > {{answer}}
