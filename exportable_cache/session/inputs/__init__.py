"""What a user gives, turned into inputs of steps."""
