"""What a tenant may send to a frontend: requests and tokens a minute, and requests at a time."""
