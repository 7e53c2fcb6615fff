mkdir {{directory}}
