"""What an agent may try, each attack told once and run twice: in a sandbox, where it must win nothing, and in a place
without walls, where it must win, so that a check which sees nothing is found out.
"""
