"""The other processes of the job: whom to agree with, and who is missing."""
