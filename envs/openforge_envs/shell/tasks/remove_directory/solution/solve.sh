rm -r {{directory}}
