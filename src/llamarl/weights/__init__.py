"""How weights get from the role that trains them to the roles that use them, without passing through the controller."""
