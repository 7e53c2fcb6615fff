claw rooms_free '{"date": "2031-05-12", "time": "10:00"}' >/dev/null
claw rooms_book '{"room": "Linden", "date": "2031-05-12", "time": "10:00", "title": "Budget review"}' >/dev/null
echo 'I booked Linden for the Budget review on 2031-05-12 at 10:00.'
