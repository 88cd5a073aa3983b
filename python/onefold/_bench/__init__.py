"""What `onefold bench` measures, what it says about that, and the picture it draws."""
