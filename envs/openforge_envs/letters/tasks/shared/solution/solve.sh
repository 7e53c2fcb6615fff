printf HELLOHELLOHELLOHELLO > answer.txt
