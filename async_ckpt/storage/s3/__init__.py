"""Object stores by way of obstore."""
