"""Where the doctor's facts are measured: the installed TRL, Liger-Kernel and PEFT on the user's own model."""
