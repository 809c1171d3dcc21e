//! The `rocinante` command.
fn main() {}
