//! Two engines in one process, whose instructions `cargo xtask instructions` counts. `benches/` has
//! losses and floods: `cargo bench -p rocinante-benches`. For end-to-end measurements, each backend
//! beside its raw baseline, see `rocinante-bench`.

pub mod engine;
