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

pub(crate) mod cm;
pub(crate) mod device;
pub(crate) mod endpoint;
pub(crate) mod error;
pub(crate) mod event;
pub(crate) mod qp;
pub(crate) mod resources;
pub(crate) mod turns;
pub(crate) mod wc;
