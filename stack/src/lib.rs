//! The RoCEv2 engine.
#![forbid(unsafe_code)]
