//! `libibverbs.so.1`, opened at run time.
#![allow(unsafe_code)]

use std::ffi::{c_char, c_int, c_uint, c_void};

use super::abi::{
    Ah, AhAttr, AsyncEvent, CompChannel, Context, Cq, Device, DeviceAttr, Mr, Pd, PortAttr, Qp,
    QpAttr, QpInitAttr, Srq, SrqAttr, SrqInitAttr,
};

/// The library's name for the dynamic linker.
pub(crate) const SONAME: &str = "libibverbs.so.1";

/// Declares the functions of a library that this crate uses; those that older versions lack are
/// behind `optional:`. The first use opens the library, and nothing closes it.
macro_rules! library {
    (
        $soname:expr;
        $( fn $name:ident($($argument:ty),*) $(-> $result:ty)?; )*
        optional: $( fn $newer:ident($($newer_argument:ty),*) -> $newer_result:ty; )*
    ) => {
        /// The functions of the library that are used. It is never closed.
        #[derive(Debug)]
        pub(crate) struct Library {
            $( pub(super) $name: unsafe extern "C" fn($($argument),*) $(-> $result)?, )*
            $( pub(super) $newer: Option<unsafe extern "C" fn($($newer_argument),*) -> $newer_result>, )*
        }

        impl Library {
            fn load() -> Result<Self, String> {
                let reason = $crate::ffi::library::reason;
                // SAFETY: the constructors of the system's RDMA libraries may run on any thread.
                let handle = unsafe { libloading::Library::new($soname) };
                let handle = handle.map_err(|error| reason(&error))?;
                let library = Self {
                    // SAFETY: the type is that of the function in the library's header. The
                    // function has only one version, or has not changed since the version node
                    // IBVERBS_1.1, the node of the default symbols.
                    $( $name: *unsafe { handle.get(stringify!($name)) }.map_err(|error| reason(&error))?, )*
                    // SAFETY: as above.
                    $( $newer: unsafe { handle.get(stringify!($newer)) }.ok().map(|found| *found), )*
                };
                // The program calls these functions until the process ends.
                std::mem::forget(handle);
                Ok(library)
            }

            /// The library, loaded once; or the reason why it cannot be loaded.
            pub(crate) fn get() -> Result<&'static Self, &'static str> {
                static LIBRARY: std::sync::OnceLock<Result<Library, String>> =
                    std::sync::OnceLock::new();
                LIBRARY.get_or_init(Self::load).as_ref().map_err(String::as_str)
            }
        }
    };
}

pub(super) use library;

library! {
    SONAME;
    fn ibv_get_device_list(*mut c_int) -> *mut *mut Device;
    fn ibv_free_device_list(*mut *mut Device);
    fn ibv_get_device_name(*mut Device) -> *const c_char;
    fn ibv_open_device(*mut Device) -> *mut Context;
    fn ibv_close_device(*mut Context) -> c_int;
    fn ibv_query_device(*mut Context, *mut DeviceAttr) -> c_int;
    fn ibv_query_port(*mut Context, u8, *mut PortAttr) -> c_int;
    fn ibv_get_async_event(*mut Context, *mut AsyncEvent) -> c_int;
    fn ibv_ack_async_event(*mut AsyncEvent);
    fn ibv_alloc_pd(*mut Context) -> *mut Pd;
    fn ibv_dealloc_pd(*mut Pd) -> c_int;
    fn ibv_reg_mr(*mut Pd, *mut c_void, usize, c_int) -> *mut Mr;
    fn ibv_dereg_mr(*mut Mr) -> c_int;
    fn ibv_rereg_mr(*mut Mr, c_int, *mut Pd, *mut c_void, usize, c_int) -> c_int;
    fn ibv_create_comp_channel(*mut Context) -> *mut CompChannel;
    fn ibv_destroy_comp_channel(*mut CompChannel) -> c_int;
    fn ibv_get_cq_event(*mut CompChannel, *mut *mut Cq, *mut *mut c_void) -> c_int;
    fn ibv_ack_cq_events(*mut Cq, c_uint);
    fn ibv_create_cq(*mut Context, c_int, *mut c_void, *mut CompChannel, c_int) -> *mut Cq;
    fn ibv_destroy_cq(*mut Cq) -> c_int;
    fn ibv_create_ah(*mut Pd, *mut AhAttr) -> *mut Ah;
    fn ibv_destroy_ah(*mut Ah) -> c_int;
    fn ibv_create_srq(*mut Pd, *mut SrqInitAttr) -> *mut Srq;
    fn ibv_modify_srq(*mut Srq, *mut SrqAttr, c_int) -> c_int;
    fn ibv_query_srq(*mut Srq, *mut SrqAttr) -> c_int;
    fn ibv_destroy_srq(*mut Srq) -> c_int;
    fn ibv_create_qp(*mut Pd, *mut QpInitAttr) -> *mut Qp;
    fn ibv_modify_qp(*mut Qp, *mut QpAttr, c_int) -> c_int;
    fn ibv_query_qp(*mut Qp, *mut QpAttr, c_int, *mut QpInitAttr) -> c_int;
    fn ibv_destroy_qp(*mut Qp) -> c_int;
    fn ibv_attach_mcast(*mut Qp, *const [u8; 16], u16) -> c_int;
    fn ibv_detach_mcast(*mut Qp, *const [u8; 16], u16) -> c_int;

    optional:
    fn ibv_qp_to_qp_ex(*mut Qp) -> *mut c_void;
    fn ibv_reg_mr_iova2(*mut Pd, *mut c_void, usize, u64, c_uint) -> *mut Mr;
}

/// The dynamic linker's message.
pub(super) fn reason(error: &libloading::Error) -> String {
    std::error::Error::source(error).map_or_else(|| error.to_string(), ToString::to_string)
}
