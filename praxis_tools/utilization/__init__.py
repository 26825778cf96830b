"""MFU and HFU of a job's steps, from traced and compiled programs and the table of chips."""
