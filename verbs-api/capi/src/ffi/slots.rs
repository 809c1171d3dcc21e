//! Import slots of one loaded module: where its calls of functions of other libraries go. The calls
//! of all others stay as they are.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_char, c_int, c_void};
use std::io;
use std::mem::size_of;
use std::sync::atomic::{AtomicPtr, Ordering};

/// A function of a module's imports that this library stands before.
pub(super) struct Before {
    pub(super) name: &'static CStr,
    pub(super) ours: *const c_void,
}

/// Has each module that imports `mark` call ours. A module that is done already stays as it is. The
/// old value of a slot is of no use: before the first call it may be the loader's own code, which
/// would write the slot anew.
///
/// Calls that a module has begun meanwhile may still go to theirs. Error: a slot's page cannot be
/// made writable (mprotect(2)): this slot stays as it is.
pub(super) fn stand_before(mark: &CStr, functions: &[Before]) -> io::Result<()> {
    let mut search = Search { mark, functions, done: Ok(()) };
    // SAFETY: the callback gets the pointer to `search`, which outlives the call.
    unsafe { libc::dl_iterate_phdr(Some(visit), (&raw mut search).cast()) };
    search.done
}

/// What [`visit`] does with each module.
struct Search<'a> {
    mark: &'a CStr,
    functions: &'a [Before],
    done: io::Result<()>,
}

unsafe extern "C" fn visit(info: *mut libc::dl_phdr_info, _: usize, search: *mut c_void) -> c_int {
    // SAFETY: `stand_before` gave this pointer, and the loader that of a module that it keeps
    // loaded until this returns.
    unsafe {
        let search = &mut *search.cast::<Search<'_>>();
        if let Some(module) = Module::of(&*info)
            && module.imports().any(|(name, _)| name == search.mark)
        {
            for (name, slot) in module.imports() {
                if let Some(before) = search.functions.iter().find(|before| before.name == name)
                    && let Err(error) = module.point(slot, before)
                {
                    search.done = Err(error);
                }
            }
        }
    }
    0
}

/// The tables of a loaded module.
struct Module {
    base: usize,
    symbols: *const Symbol,
    strings: *const c_char,
    /// The tables of relocations, each with the number of its entries.
    relocations: [(*const Relocation, usize); 2],
    /// The pages that the loader made read-only after relocating, from and until.
    read_only: (usize, usize),
}

/// `Elf64_Sym`.
#[repr(C)]
struct Symbol {
    name: u32,
    info: u8,
    other: u8,
    section: u16,
    value: u64,
    size: u64,
}

/// `Elf64_Rela`.
#[repr(C)]
struct Relocation {
    offset: u64,
    info: u64,
    addend: i64,
}

/// `Elf64_Dyn`.
#[repr(C)]
struct Dynamic {
    tag: i64,
    value: u64,
}

/// `R_X86_64_GLOB_DAT` and `..._JUMP_SLOT`.
#[cfg(target_arch = "x86_64")]
const IMPORTS: [u32; 2] = [6, 7];
/// `R_AARCH64_GLOB_DAT` and `..._JUMP_SLOT`.
#[cfg(target_arch = "aarch64")]
const IMPORTS: [u32; 2] = [1025, 1026];

impl Module {
    /// `None` for a module without a table of relocations with addends, such as the kernel's vDSO.
    ///
    /// # Safety
    /// The loader's description of a module that stays loaded.
    unsafe fn of(info: &libc::dl_phdr_info) -> Option<Self> {
        const DT_PLTRELSZ: i64 = 2;
        const DT_STRTAB: i64 = 5;
        const DT_SYMTAB: i64 = 6;
        const DT_RELA: i64 = 7;
        const DT_RELASZ: i64 = 8;
        const DT_JMPREL: i64 = 23;
        let base = usize::try_from(info.dlpi_addr).ok()?;
        let count = usize::from(info.dlpi_phnum);
        // SAFETY: the loader's array of `count` headers.
        let headers = unsafe { std::slice::from_raw_parts(info.dlpi_phdr, count) };
        let at = |header: &libc::Elf64_Phdr| base + header.p_vaddr as usize;
        let header = |kind: u32| headers.iter().find(|header| header.p_type == kind);
        let mut dynamic = at(header(libc::PT_DYNAMIC)?) as *const Dynamic;
        let [mut symbols, mut strings, mut table, mut bytes, mut jumps, mut jump_bytes] = [0; 6];
        loop {
            // SAFETY: the module's dynamic section, whose last entry has tag 0.
            let entry = unsafe { &*dynamic };
            let place = match entry.tag {
                0 => break,
                DT_SYMTAB => &mut symbols,
                DT_STRTAB => &mut strings,
                DT_RELA => &mut table,
                DT_RELASZ => &mut bytes,
                DT_JMPREL => &mut jumps,
                DT_PLTRELSZ => &mut jump_bytes,
                _ => &mut 0,
            };
            *place = usize::try_from(entry.value).ok()?;
            // SAFETY: this was not the last entry.
            dynamic = unsafe { dynamic.add(1) };
        }
        // glibc makes addresses of these; musl, and the vDSO, leave offsets.
        let absolute = |at: usize| if at == 0 || at >= base { at } else { base + at };
        if symbols == 0 || strings == 0 {
            return None;
        }
        let entries =
            |at, bytes| (absolute(at) as *const Relocation, bytes / size_of::<Relocation>());
        Some(Self {
            base,
            symbols: absolute(symbols) as *const Symbol,
            strings: absolute(strings) as *const c_char,
            relocations: [entries(table, bytes), entries(jumps, jump_bytes)],
            read_only: header(libc::PT_GNU_RELRO)
                .map_or((0, 0), |relro| (at(relro), at(relro) + relro.p_memsz as usize)),
        })
    }

    /// The functions and objects of other modules that this one uses, each with its slot.
    fn imports(&self) -> impl Iterator<Item = (&CStr, *const AtomicPtr<c_void>)> {
        let tables = self.relocations.iter().filter(|(at, _)| !at.is_null());
        // SAFETY: the module's own tables.
        let all = tables.flat_map(|(at, count)| unsafe { std::slice::from_raw_parts(*at, *count) });
        #[allow(clippy::cast_possible_truncation, reason = "the lower half is the kind")]
        let imports = all.filter(|entry| IMPORTS.contains(&(entry.info as u32)));
        imports.map(|entry| {
            // SAFETY: the entry's symbol is in the table, and the symbol's name among the strings.
            let name = unsafe {
                let symbol = &*self.symbols.add((entry.info >> 32) as usize);
                CStr::from_ptr(self.strings.add(symbol.name as usize))
            };
            (name, (self.base + entry.offset as usize) as *const AtomicPtr<c_void>)
        })
    }

    /// Points a slot to ours. Error: as [`stand_before`].
    ///
    /// # Safety
    /// The slot is one of this module's.
    unsafe fn point(&self, slot: *const AtomicPtr<c_void>, before: &Before) -> io::Result<()> {
        let ours = before.ours.cast_mut();
        // SAFETY: an aligned pointer in the module's data, which its code reads as one.
        if unsafe { (*slot).load(Ordering::Relaxed) } == ours {
            return Ok(());
        }
        let page = rustix::param::page_size();
        let start = slot as usize & !(page - 1);
        let protected = (self.read_only.0..self.read_only.1).contains(&(slot as usize));
        let protect = |protection| {
            // SAFETY: a page of the module's data, which stays mapped and readable.
            !protected || unsafe { libc::mprotect(start as *mut c_void, page, protection) } == 0
        };
        if !protect(libc::PROT_READ | libc::PROT_WRITE) {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: as above, and writable now.
        unsafe { (*slot).store(ours, Ordering::Release) };
        protect(libc::PROT_READ);
        Ok(())
    }
}
