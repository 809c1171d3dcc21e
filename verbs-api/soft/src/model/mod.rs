//! The values of the API: errors, limits, attributes, counters and events. It knows the types of
//! `rocinante-stack` and `rocinante-netdev`, and nothing else of this crate.

/// Methods that set one field each, for structs that programs cannot write as literals.
macro_rules! setters {
    ($name:ident { $($field:ident: $type:ty,)* }) => {
        impl $name {
            $(
                #[doc = concat!(
                    "Sets [`", stringify!($field), "`](#structfield.", stringify!($field), ")."
                )]
                #[must_use]
                pub const fn $field(mut self, $field: $type) -> Self {
                    self.$field = $field;
                    self
                }
            )*
        }
    };
}

pub mod cm;
pub mod device;
pub mod endpoint;
pub mod error;
pub mod event;
pub mod qp;
pub mod resources;
pub mod turns;
pub mod wc;
