//! Chapters about using the library. Every example in them compiles and runs.
//!
//! 1. [A first program](first_program)
//! 2. [Errors](errors)
//! 3. [Memory model](memory)
//! 4. [Threads](threads)
//! 5. [Asynchronous programs](asynchronous)
//! 6. [Limits](limits)
//! 7. [When the peer dies](peers)

#[doc = include_str!("guide/first_program.md")]
pub mod first_program {}

#[doc = include_str!("guide/errors.md")]
pub mod errors {}

#[doc = include_str!("guide/memory.md")]
pub mod memory {}

#[doc = include_str!("guide/threads.md")]
pub mod threads {}

#[doc = include_str!("guide/asynchronous.md")]
pub mod asynchronous {}

#[doc = include_str!("guide/limits.md")]
pub mod limits {}

#[doc = include_str!("guide/peers.md")]
pub mod peers {}
