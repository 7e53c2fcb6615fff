from openforge.sandbox.docker.gate.serve import main

main()
