"""One module for each library: functions that train, registered in `CASES`."""
