mkdir {{directory}}
touch {{directory}}/{{file}}
