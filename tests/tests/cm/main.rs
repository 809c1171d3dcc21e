//! The connection manager end to end, and the ends of programs that it tells peers of.

mod connect;
mod death;
mod gone;
mod kinds;
mod leaks;
mod log;
mod neighbours;
