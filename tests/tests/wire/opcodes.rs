//! The opcode table, committed as a text: other implementations must agree with its lengths and
//! offsets.

use std::fmt::Write;

use rocinante_stack::wire::{Ext, Opcode, OpcodeInfo, Service, bth};
use rocinante_tests::snapshot::assert_snapshot;

#[test]
fn the_opcode_table_is_what_it_was() {
    let mut text = String::from(
        "code  name                               service  operation          place   header  \
         extension headers at offset; what it is\n",
    );
    for info in Opcode::all() {
        writeln!(text, "{}", row(info).trim_end()).unwrap();
    }
    assert_snapshot("opcodes.txt", &text);
}

fn row(info: &OpcodeInfo) -> String {
    let extensions = info
        .extensions
        .iter()
        .map(|ext| format!("{ext:?}@{} ", info.offset(*ext).expect("an extension of its own")));
    let traits = [
        (info.is_request(), "request"),
        (info.has_payload(), "payload"),
        (info.consumes_receive(), "receive"),
        (info.place.begins(), "begins"),
        (info.place.ends(), "ends"),
    ];
    let traits: Vec<_> = traits.into_iter().filter_map(|(has, name)| has.then_some(name)).collect();
    format!(
        "0x{:02x}  {:33}  {:7}  {:17}  {:6}  {:6}  {:22}; {}",
        info.opcode.0,
        info.name,
        format!("{:?}", info.service),
        format!("{:?}", info.operation),
        format!("{:?}", info.place),
        info.header_len,
        extensions.collect::<String>().trim_end(),
        traits.join(" "),
    )
}

/// Properties that follow from the opcode and the sizes of `ib_pack.h`, without the table.
#[test]
fn the_table_agrees_with_itself() {
    let mut last = None;
    for info in Opcode::all() {
        assert!(last < Some(info.opcode), "{} is out of order", info.name);
        last = Some(info.opcode);
        assert_eq!(info.opcode.info().unwrap().name, info.name);
        assert_eq!(format!("{:?}", info.opcode), info.name);
        let service = match info.opcode.0 >> 5 {
            0 => Service::Rc,
            1 => Service::Uc,
            3 => Service::Ud,
            _ => Service::Cnp,
        };
        assert_eq!(info.service, service, "{}", info.name);
        let mut at = bth::LEN;
        for ext in info.extensions {
            assert!(info.has(*ext));
            assert_eq!(info.offset(*ext), Some(at), "{} {ext:?}", info.name);
            at += ext.size();
        }
        assert_eq!(info.header_len, at, "{}", info.name);
        assert_eq!(info.has(Ext::ImmDt), info.name.ends_with("WITH_IMMEDIATE"), "{}", info.name);
        assert_eq!(info.has(Ext::Ieth), info.name.ends_with("WITH_INVALIDATE"), "{}", info.name);
        assert_eq!(info.has(Ext::Deth), service == Service::Ud, "{}", info.name);
    }
    let known = (0..=u8::MAX).filter(|value| Opcode(*value).info().is_some()).count();
    assert_eq!(known, Opcode::all().count());
}
