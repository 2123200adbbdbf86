//! Istio's metadata exchange over TCP: the first message of each side if ALPN selected `istio-peer-exchange`.
//!
//! The message is a magic number, a length (both big-endian), and an `Any` with a `Struct`. The struct holds the
//! metadata and the node id under the names of the HTTP headers. The application does not see the message.

use std::collections::BTreeMap;

use prost::Message as _;
use prost_types::{Any, Struct, Value, value::Kind};

use super::{MAX_METADATA, METADATA, METADATA_ID, text_value, workload_of};
use crate::config::cluster::Workload;

/// ALPN protocol of the exchange.
pub const ALPN: &[u8] = b"istio-peer-exchange";

const MAGIC: u32 = 0x3D23_0467;
const HEADER: usize = 8;

/// First message of a connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FirstMessage {
    /// More bytes are needed.
    Incomplete,
    /// No message: all bytes belong to the application.
    Absent,
    /// A message with its length in bytes, and the peer's workload if it could be parsed.
    Complete(usize, Option<Workload>),
    /// The message is larger than 16 KiB; the connection must be closed.
    TooLarge,
}

/// Parses the first bytes of a connection.
pub fn read(bytes: &[u8]) -> FirstMessage {
    let magic = MAGIC.to_be_bytes();
    let begun = bytes.len().min(magic.len());
    if bytes[..begun] != magic[..begun] {
        return FirstMessage::Absent;
    }
    let Some(header) = bytes.first_chunk::<HEADER>() else { return FirstMessage::Incomplete };
    let [_, _, _, _, a, b, c, d] = *header;
    let size = u32::from_be_bytes([a, b, c, d]) as usize;
    if size > MAX_METADATA {
        return FirstMessage::TooLarge;
    }
    match bytes.get(HEADER..HEADER + size) {
        Some(data) => FirstMessage::Complete(HEADER + size, decode(data)),
        None => FirstMessage::Incomplete,
    }
}

fn decode(data: &[u8]) -> Option<Workload> {
    let any = Any::decode(data).ok()?;
    let data = Struct::decode(&*any.value).ok()?;
    match data.fields.get(METADATA)?.kind.as_ref()? {
        Kind::StructValue(metadata) => Some(workload_of(metadata)),
        _ => None,
    }
}

/// Returns the message of this proxy.
pub(super) fn write(node_id: &str, metadata: Struct) -> Vec<u8> {
    let fields = BTreeMap::from([
        (METADATA.to_owned(), Value { kind: Some(Kind::StructValue(metadata)) }),
        (METADATA_ID.to_owned(), text_value(node_id)),
    ]);
    let any = Any {
        type_url: "type.googleapis.com/google.protobuf.Struct".to_owned(),
        value: Struct { fields }.encode_to_vec(),
    };
    let data = any.encode_to_vec();
    // Node metadata are far smaller than 4 GB.
    let size = u32::try_from(data.len()).unwrap_or_default();
    [&MAGIC.to_be_bytes()[..], &size.to_be_bytes(), &data].concat()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn greeting() -> Vec<u8> {
        let fields = BTreeMap::from([("WORKLOAD_NAME".to_owned(), text_value("reviews-v1"))]);
        write("sidecar~a", Struct { fields })
    }

    #[test]
    fn a_greeting_is_parsed_when_it_is_complete() {
        let mut bytes = greeting();
        let len = bytes.len();
        for end in 0..len {
            assert_eq!(read(&bytes[..end]), FirstMessage::Incomplete, "{end}");
        }
        bytes.extend_from_slice(b"data of the application");
        let FirstMessage::Complete(consumed, Some(workload)) = read(&bytes) else { panic!("not read") };
        assert_eq!((consumed, &*workload.name), (len, "reviews-v1"));
    }

    #[test]
    fn other_bytes_are_passed_through() {
        assert_eq!(read(b"GET / HTTP/1.1"), FirstMessage::Absent);
        assert_eq!(read(&[0x3d, 0x24]), FirstMessage::Absent);
        assert_eq!(read(&[0x3d, 0x23, 4, 0x67, 1, 0, 0, 0]), FirstMessage::TooLarge);
        assert_eq!(read(&[0x3d, 0x23, 4, 0x67, 0, 0, 0, 1, 255]), FirstMessage::Complete(9, None));
    }

    proptest! {
        #[test]
        fn any_input_is_handled(bytes in proptest::collection::vec(any::<u8>(), 0..60)) {
            let _ = read(&bytes);
            let _ = read(&[&[0x3d, 0x23, 4, 0x67, 0, 0, 0, 20][..], &bytes].concat());
        }
    }
}
