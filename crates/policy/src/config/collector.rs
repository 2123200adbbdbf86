//! Collectors of access logs and spans, which receive items in batches.

use std::time::Duration;

use prost::encoding::{WireType, encode_key, encode_varint};

/// A collector of items. Equal collectors share their batches.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Collector {
    /// Kind of items, for metrics and warnings: `access logs`, `spans`.
    pub what: &'static str,
    /// Cluster of the collector.
    pub cluster: Box<str>,
    /// `:authority` of the requests.
    pub authority: Box<str>,
    /// Protocol.
    pub call: Call,
    /// Additional headers (`initial_metadata`).
    pub headers: Vec<(Box<str>, Box<str>)>,
    /// Timeout for sending a batch.
    pub timeout: Duration,
    /// Maximum time for which an item waits in a batch (`buffer_flush_interval`).
    pub interval: Duration,
    /// Size in bytes at which a batch is sent at once (`buffer_size_bytes`).
    pub size: usize,
    /// Encoding around the items of a batch.
    pub envelope: Envelope,
}

/// Protocol of a collector.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Call {
    /// A unary gRPC call to this path, for each batch.
    Unary(&'static str),
    /// A client-streaming gRPC call to this path; each batch is a message.
    Stream(&'static str),
    /// An HTTP POST request for each batch.
    Post {
        /// Path of the request.
        path: Box<str>,
        /// `content-type` of the request.
        content_type: &'static str,
    },
}

/// Encoding around the items of a batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Envelope {
    /// The items are values of a repeated field of a message, which may be nested in other messages.
    Message {
        /// The other fields of that message, encoded.
        before: Vec<u8>,
        /// The outer messages, from the inside: their other fields, encoded, and the number of the field that holds
        /// the inner message.
        around: Vec<(Vec<u8>, u32)>,
        /// Fields of the outermost message that are sent once per stream.
        first: Vec<u8>,
    },
    /// The items are values of a JSON array, each followed by a comma.
    Array,
}

impl Envelope {
    /// Returns the message for a batch. `first`: it is the first message of its stream.
    pub fn wrap(&self, items: &[u8], first: bool) -> Vec<u8> {
        match self {
            Self::Message { before, around, first: once } => {
                let mut content = [before, items].concat();
                for (before, field) in around {
                    let inner = std::mem::replace(&mut content, before.clone());
                    encode_key(*field, WireType::LengthDelimited, &mut content);
                    encode_varint(inner.len() as u64, &mut content);
                    content.extend_from_slice(&inner);
                }
                if first { [once, content.as_slice()].concat() } else { content }
            }
            Self::Array => [b"[", items.strip_suffix(b",").unwrap_or(items), b"]"].concat(),
        }
    }
}

#[cfg(test)]
mod tests {
    use prost::{Message as _, encoding::message};
    use skysail_proto::otlp::{
        ExportLogsServiceRequest, InstrumentationScope, LogRecord, Resource, ResourceLogs, ScopeLogs,
        attribute,
    };

    use super::*;

    #[test]
    fn items_are_nested_in_their_messages() {
        let logs = [1, 2].map(|time_unix_nano| LogRecord { time_unix_nano, ..LogRecord::default() });
        let scope = Some(InstrumentationScope { name: "s".into(), ..InstrumentationScope::default() });
        let resource = Some(Resource { attributes: vec![attribute("k", "v")], ..Resource::default() });
        let around = ResourceLogs { resource: resource.clone(), ..ResourceLogs::default() };
        let before = ScopeLogs { scope: scope.clone(), ..ScopeLogs::default() };
        let envelope = Envelope::Message {
            before: before.encode_to_vec(),
            around: vec![(around.encode_to_vec(), 2), (Vec::new(), 1)],
            first: Vec::new(),
        };
        let mut items = Vec::new();
        for log in &logs {
            message::encode(2, log, &mut items);
        }
        let scope_logs = vec![ScopeLogs { scope, log_records: logs.to_vec(), ..ScopeLogs::default() }];
        let resource_logs = vec![ResourceLogs { resource, scope_logs, ..ResourceLogs::default() }];
        let request = ExportLogsServiceRequest::decode(envelope.wrap(&items, true).as_slice()).unwrap();
        assert_eq!(request, ExportLogsServiceRequest { resource_logs });

        assert_eq!(Envelope::Array.wrap(b"1,2,", false), b"[1,2]");
        assert_eq!(Envelope::Array.wrap(b"", false), b"[]");
    }
}
