//! A fingerprint of an encoded message that does not depend on the order of its map entries.
//!
//! prost keeps protobuf maps in hash maps, so encoding the same message twice gives different bytes. A version
//! made from the bytes would then change without cause and every proxy be sent what it has. On the wire a map is
//! a run of fields of one number, each a message of a string key (field 1) and a value (field 2). Such runs are
//! hashed as sets, everything else in order. Other lists of exactly this form exist, but in Envoy's API their
//! order means nothing, or next to nothing.

use xxhash_rust::xxh3::xxh3_64_with_seed;

/// Fields nested deeper than this are hashed as plain bytes.
const MAX_DEPTH: u32 = 64;

/// Hashes an encoded message; stable across processes and releases of the compiler.
pub(crate) fn fingerprint(body: &[u8]) -> u64 {
    message(body, MAX_DEPTH).unwrap_or_else(|| xxh3_64_with_seed(body, 0))
}

/// One field of a message.
struct Field<'a> {
    /// Number and wire type.
    tag: u64,
    value: &'a [u8],
}

const LENGTH_DELIMITED: u64 = 2;
const KEY: u64 = (1 << 3) | LENGTH_DELIMITED;
const VALUE: u64 = (2 << 3) | LENGTH_DELIMITED;

/// The hash of bytes read as a message; `None` when they are none.
fn message(mut rest: &[u8], depth: u32) -> Option<u64> {
    let depth = depth.checked_sub(1)?;
    let mut hash = 1;
    // The run of map entries just being read: its tag, the sum of its hashes.
    let mut run: Option<(u64, u64)> = None;
    while !rest.is_empty() {
        let field = next(&mut rest)?;
        let nested = (field.tag & 7 == LENGTH_DELIMITED).then(|| message(field.value, depth)).flatten();
        let value = nested.unwrap_or_else(|| xxh3_64_with_seed(field.value, 2));
        run = match run {
            Some((tag, sum)) if tag == field.tag && is_map_entry(&field) => {
                Some((tag, sum.wrapping_add(value)))
            }
            before => {
                hash = finish(hash, before);
                if is_map_entry(&field) {
                    Some((field.tag, value))
                } else {
                    hash = mix(hash, field.tag, value);
                    None
                }
            }
        };
    }
    Some(finish(hash, run))
}

fn finish(hash: u64, run: Option<(u64, u64)>) -> u64 {
    run.map_or(hash, |(tag, sum)| mix(hash, tag, sum))
}

fn mix(hash: u64, tag: u64, value: u64) -> u64 {
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&tag.to_le_bytes());
    bytes[8..].copy_from_slice(&value.to_le_bytes());
    xxh3_64_with_seed(&bytes, hash)
}

fn is_map_entry(field: &Field<'_>) -> bool {
    let read = || {
        let mut rest = field.value;
        let key = next(&mut rest)?;
        let value = if rest.is_empty() { None } else { Some(next(&mut rest)?) };
        let printable = !key.value.is_empty() && key.value.iter().all(|byte| !byte.is_ascii_control());
        (rest.is_empty() && key.tag == KEY && printable && value.is_none_or(|value| value.tag == VALUE))
            .then_some(())
    };
    field.tag & 7 == LENGTH_DELIMITED && read().is_some()
}

/// Takes the next field off; `None` when the bytes are no message.
fn next<'a>(rest: &mut &'a [u8]) -> Option<Field<'a>> {
    let tag = varint(rest)?;
    let start = *rest;
    let length = match tag & 7 {
        0 => {
            varint(rest)?;
            start.len() - rest.len()
        }
        1 => 8,
        LENGTH_DELIMITED => {
            let length = usize::try_from(varint(rest)?).ok()?;
            let (value, after) = rest.split_at_checked(length)?;
            *rest = after;
            return (tag >> 3 != 0).then_some(Field { tag, value });
        }
        5 => 4,
        _ => return None,
    };
    let (value, after) = start.split_at_checked(length)?;
    *rest = after;
    (tag >> 3 != 0).then_some(Field { tag, value })
}

fn varint(rest: &mut &[u8]) -> Option<u64> {
    let mut value = 0;
    for (index, byte) in rest.iter().enumerate().take(10) {
        value |= u64::from(byte & 0x7f) << (7 * index);
        if byte & 0x80 == 0 {
            *rest = &rest[index + 1..];
            return Some(value);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use envoy_types::pb::{
        envoy::config::{
            cluster::v3::Cluster,
            core::v3::Metadata,
            listener::v3::{Filter, FilterChain},
        },
        google::protobuf::{Struct, Value, value},
    };
    use prost::Message as _;

    use super::*;

    fn cluster(names: impl Iterator<Item = u32>) -> Cluster {
        let fields: Vec<_> = names
            .map(|n| {
                (format!("field-{n}"), Value { kind: Some(value::Kind::StringValue(format!("text {n}"))) })
            })
            .collect();
        let filter_metadata = fields
            .iter()
            .map(|(name, _)| (name.clone(), Struct { fields: fields.iter().cloned().collect() }))
            .collect();
        Cluster {
            name: "outbound|80||a".into(),
            metadata: Some(Metadata { filter_metadata, ..Metadata::default() }),
            ..Cluster::default()
        }
    }

    #[test]
    fn the_order_of_map_entries_does_not_count() {
        let first = cluster(0..20).encode_to_vec();
        let second = cluster((0..20).rev()).encode_to_vec();
        assert_ne!(first, second, "two hash maps of 20 strings in the same order");
        assert_eq!(fingerprint(&first), fingerprint(&second));
        assert_ne!(fingerprint(&first), fingerprint(&cluster(0..19).encode_to_vec()));
        assert_ne!(fingerprint(&first), fingerprint(&cluster(1..21).encode_to_vec()));
    }

    #[test]
    fn the_order_of_lists_counts() {
        let chain = |names: &[&str]| {
            let filters = names
                .iter()
                .map(|name| Filter { name: (*name).into(), config_type: None })
                .collect::<Vec<_>>();
            // A typed filter carries a field 4, so it is no map entry; without one it would be.
            let filters = filters
                .into_iter()
                .map(|mut filter| {
                    filter.config_type =
                        Some(envoy_types::pb::envoy::config::listener::v3::filter::ConfigType::TypedConfig(
                            envoy_types::pb::google::protobuf::Any::default(),
                        ));
                    filter
                })
                .collect();
            FilterChain { filters, ..FilterChain::default() }.encode_to_vec()
        };
        assert_ne!(fingerprint(&chain(&["rbac", "router"])), fingerprint(&chain(&["router", "rbac"])));
        assert_eq!(fingerprint(&chain(&["rbac", "router"])), fingerprint(&chain(&["rbac", "router"])));
    }

    #[test]
    fn any_bytes_are_hashed() {
        let texts: [&[u8]; 6] = [b"", b"\x0a", b"\x0a\xff", b"plain", b"\x08\x96\x01", &[0xff; 40]];
        let mut seen: Vec<_> = texts.iter().map(|text| fingerprint(text)).collect();
        seen.sort_unstable();
        seen.dedup();
        assert_eq!(seen.len(), texts.len());
    }
}
