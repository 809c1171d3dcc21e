//! End to end between two containers: a device as programs see it, on every backend.

mod auto;
mod contexts;
mod cuts;
mod death;
mod encrypted;
mod flood;
mod hostile;
mod leaks;
mod loss;
mod many;
mod memory;
mod misuse;
mod operations;
mod progress;
mod rails;
mod recognition;
mod shards;
mod sysfs;
mod threads;
mod unreliable;

/// Tests of the API that have their modules in `rocinante_tests::verbs`.
macro_rules! of_the_api {
    ($( $module:ident: $($tests:ident)+; )+) => {$(
        mod $module {
            $( rocinante_tests::on_each_backend!($tests::*); )+
        }
    )+};
}

of_the_api! {
    errors: errors;
    flush: flush;
    mcast: mcast;
    objects: objects register;
    services: services;
    srq: srq;
    windows: windows;
}
