mkdir -p {{outer}}/{{inner}}
