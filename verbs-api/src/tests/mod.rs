//! Whole devices over simulated ports, seen from the API and from within.

mod recognition;
mod two;
