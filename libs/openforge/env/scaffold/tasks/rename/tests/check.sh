cd /workspace || exit 1
if [ "$(ls -A)" = "{{new}}.txt" ] && [ ! -L "{{new}}.txt" ] && [ "$(cat "{{new}}.txt")" = "{{text}}" ]; then
  echo '{"reward": 1}'
else
  echo '{"reward": 0}'
fi
