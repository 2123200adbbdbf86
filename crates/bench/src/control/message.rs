//! Messages of the discovery protocol, encoded and scanned by hand.
//!
//! Thousands of sidecars in one process must use little CPU time, which the control plane would lack otherwise.
//! Resources are counted and skipped, unless their names are needed. Source: `envoy.service.discovery.v3`.

use anyhow::{Context as _, bail, ensure};

/// Resource type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Kind {
    Cluster,
    Endpoint,
    Listener,
    Route,
    VirtualHost,
    Secret,
}

impl Kind {
    /// Types of a sidecar, in the order in which it subscribes to them.
    pub(crate) const ALL: [Self; 5] =
        [Self::Cluster, Self::Endpoint, Self::Listener, Self::Route, Self::VirtualHost];

    pub(crate) const fn url(self) -> &'static str {
        match self {
            Self::Cluster => "type.googleapis.com/envoy.config.cluster.v3.Cluster",
            Self::Endpoint => "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment",
            Self::Listener => "type.googleapis.com/envoy.config.listener.v3.Listener",
            Self::Route => "type.googleapis.com/envoy.config.route.v3.RouteConfiguration",
            Self::VirtualHost => "type.googleapis.com/envoy.config.route.v3.VirtualHost",
            Self::Secret => "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.Secret",
        }
    }

    fn of_url(url: &[u8]) -> Option<Self> {
        Self::ALL.into_iter().chain([Self::Secret]).find(|kind| kind.url().as_bytes() == url)
    }
}

/// Form of the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Form {
    /// Incremental: responses carry changes.
    Delta,
    /// State of the world: responses carry all resources.
    Sotw,
}

/// Writes a length-delimited field.
pub(crate) fn put(out: &mut Vec<u8>, field: u8, content: &[u8]) {
    out.push(field << 3 | 2);
    put_number(out, content.len() as u64);
    out.extend_from_slice(content);
}

fn put_number(out: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        out.push(number as u8 | 0x80);
        number >>= 7;
    }
    out.push(number as u8);
}

/// Encodes a `google.protobuf.Struct` whose values are strings and encoded structs.
pub(crate) fn object(fields: &[(&str, Field<'_>)]) -> Vec<u8> {
    let mut object = Vec::new();
    for (name, field) in fields {
        let mut value = Vec::new();
        match field {
            Field::Text(text) => put(&mut value, 3, text.as_bytes()),
            Field::Object(fields) => put(&mut value, 5, fields),
        }
        let mut entry = Vec::new();
        put(&mut entry, 1, name.as_bytes());
        put(&mut entry, 2, &value);
        put(&mut object, 1, &entry);
    }
    object
}

/// Value of a field in [`object`]: a string, or an encoded struct.
pub(crate) enum Field<'a> {
    Text(&'a str),
    Object(Vec<u8>),
}

/// A request. The first one of a type carries `names` (none for all resources); later ones acknowledge.
pub(crate) struct Ask<'a> {
    pub(crate) form: Form,
    pub(crate) kind: Kind,
    /// Encoded node, in the first request of a stream.
    pub(crate) node: &'a [u8],
    /// Nonce of the acknowledged response.
    pub(crate) nonce: &'a [u8],
    /// Names to subscribe to, encoded by [`names`], and to unsubscribe from, encoded by [`unsubscribed`]. In the state
    /// of the world, each request lists all names.
    pub(crate) names: &'a [u8],
}

/// Encodes names as fields of a request.
pub(crate) fn names<'a>(names: impl IntoIterator<Item = &'a str>) -> Vec<u8> {
    let mut out = Vec::new();
    for name in names {
        put(&mut out, 3, name.as_bytes());
    }
    out
}

/// Encodes names to unsubscribe from as fields of an incremental request.
pub(crate) fn unsubscribed<'a>(names: impl IntoIterator<Item = &'a [u8]>) -> Vec<u8> {
    let mut out = Vec::new();
    for name in names {
        put(&mut out, 4, name);
    }
    out
}

impl Ask<'_> {
    /// Writes the request as a gRPC message.
    pub(crate) fn put(&self, out: &mut Vec<u8>) {
        let start = out.len();
        out.extend_from_slice(&[0; 5]);
        let delta = self.form == Form::Delta;
        if !self.node.is_empty() {
            put(out, if delta { 1 } else { 2 }, self.node);
        }
        put(out, if delta { 2 } else { 4 }, self.kind.url().as_bytes());
        out.extend_from_slice(self.names);
        if !self.nonce.is_empty() {
            put(out, if delta { 6 } else { 5 }, self.nonce);
            if !delta {
                put(out, 1, self.nonce);
            }
        }
        let length = (out.len() - start - 5) as u32;
        out[start + 1..start + 5].copy_from_slice(&length.to_be_bytes());
    }
}

/// Fields of a response, without the content of its resources.
#[derive(Debug, Default)]
pub(crate) struct Response {
    pub(crate) kind: Option<Kind>,
    pub(crate) nonce: Vec<u8>,
    pub(crate) resources: u32,
    pub(crate) removed: u32,
    pub(crate) bytes: u64,
    /// Content of the resources, if it is kept.
    pub(crate) kept: Vec<Vec<u8>>,
    /// Names of removed resources, if the content is kept.
    pub(crate) kept_removed: Vec<Vec<u8>>,
}

/// Reads responses that arrive in pieces of any size.
#[derive(Debug, Default)]
pub(crate) struct Scanner {
    /// Incomplete bytes: the prefix of gRPC, or the key and length of a field.
    head: Vec<u8>,
    in_message: bool,
    /// Bytes of the message that are still to be received.
    left: u64,
    /// Current field, and its bytes that are still to be received.
    field: u8,
    rest: u64,
    text: Vec<u8>,
    response: Response,
    /// Maximum length in bytes of a response whose content is kept. The content of longer ones is skipped.
    max_kept: u64,
}

impl Scanner {
    pub(crate) fn new(max_kept: u64) -> Self {
        Self { max_kept, ..Self::default() }
    }

    fn keeps(&self) -> bool {
        self.response.bytes <= self.max_kept
    }

    /// Reads bytes up to the end of a response.
    pub(crate) fn feed(&mut self, form: Form, bytes: &mut &[u8]) -> anyhow::Result<Option<Response>> {
        while !bytes.is_empty() {
            if self.rest > 0 {
                let taken = usize::try_from(self.rest).unwrap_or(usize::MAX).min(bytes.len());
                let (piece, after) = bytes.split_at(taken);
                if self.field != 2 || self.keeps() {
                    self.text.extend_from_slice(piece);
                }
                *bytes = after;
                self.rest -= taken as u64;
                self.left -= taken as u64;
                if self.rest == 0 {
                    self.end_field(form);
                }
            } else {
                self.head.push(bytes[0]);
                *bytes = &bytes[1..];
                self.begin(form)?;
            }
            if self.in_message && self.left == 0 && self.rest == 0 {
                ensure!(self.head.is_empty(), "a response ends within a field");
                self.in_message = false;
                return Ok(Some(std::mem::take(&mut self.response)));
            }
        }
        Ok(None)
    }

    /// Parses `head` once it is complete.
    fn begin(&mut self, form: Form) -> anyhow::Result<()> {
        if !self.in_message {
            let Ok([compressed, length @ ..]) = <[u8; 5]>::try_from(self.head.as_slice()) else {
                return Ok(());
            };
            ensure!(compressed == 0, "a response is compressed, which was not requested");
            self.head.clear();
            self.in_message = true;
            self.left = u32::from_be_bytes(length).into();
            self.response.bytes = self.left;
            return Ok(());
        }
        ensure!(self.left > 0, "a response is longer than its prefix says");
        self.left -= 1;
        let Some((&key, number)) = self.head.split_first() else { return Ok(()) };
        if number.last().is_none_or(|last| last & 0x80 != 0) {
            ensure!(number.len() < 10, "a response has a number of more than ten bytes");
            return Ok(());
        }
        let number = number.iter().rev().fold(0, |sum, byte| sum << 7 | u64::from(byte & 0x7f));
        ensure!(key < 0x80, "a response has a field beyond the fifteenth");
        let field = key >> 3;
        self.head.clear();
        match key & 7 {
            0 => {}
            2 => {
                ensure!(number <= self.left, "a field is longer than its response");
                (self.field, self.rest) = (field, number);
                if number == 0 {
                    self.end_field(form);
                }
            }
            other => bail!("a response has a field of wire type {other}"),
        }
        Ok(())
    }

    fn end_field(&mut self, form: Form) {
        let text = std::mem::take(&mut self.text);
        match self.field {
            2 => {
                self.response.resources += 1;
                if self.keeps() {
                    self.response.kept.push(text);
                }
            }
            4 => self.response.kind = Kind::of_url(&text),
            5 => self.response.nonce = text,
            6 if form == Form::Delta => {
                self.response.removed += 1;
                if self.keeps() {
                    self.response.kept_removed.push(text);
                }
            }
            _ => {}
        }
    }
}

/// Returns the contents of all fields at a path of field numbers.
pub(crate) fn at<'a>(message: &'a [u8], path: &[u8]) -> anyhow::Result<Vec<&'a [u8]>> {
    let Some((wanted, path)) = path.split_first() else { return Ok(vec![message]) };
    let mut found = Vec::new();
    let mut rest = message;
    while !rest.is_empty() {
        let key = number(&mut rest)?;
        let content = match key & 7 {
            0 => {
                number(&mut rest)?;
                continue;
            }
            1 => take(&mut rest, 8)?,
            5 => take(&mut rest, 4)?,
            2 => {
                let length = number(&mut rest)?;
                take(&mut rest, length)?
            }
            other => bail!("a field has wire type {other}"),
        };
        if key >> 3 == u64::from(*wanted) {
            found.extend(at(content, path)?);
        }
    }
    Ok(found)
}

fn number(bytes: &mut &[u8]) -> anyhow::Result<u64> {
    let mut number = 0;
    for shift in (0..64).step_by(7) {
        let (byte, rest) = bytes.split_first().context("a number is cut short")?;
        *bytes = rest;
        number |= u64::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            return Ok(number);
        }
    }
    bail!("a number has more than ten bytes")
}

fn take<'a>(bytes: &mut &'a [u8], length: u64) -> anyhow::Result<&'a [u8]> {
    let length = usize::try_from(length)?;
    let (taken, rest) = bytes.split_at_checked(length).context("a field is cut short")?;
    *bytes = rest;
    Ok(taken)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn response() -> Vec<u8> {
        let mut message = Vec::new();
        put(&mut message, 1, b"7");
        let mut resource = Vec::new();
        put(&mut resource, 3, b"a");
        put(&mut message, 2, &resource);
        put(&mut message, 2, &[b'x'; 300]);
        put(&mut message, 2, b"");
        put(&mut message, 4, Kind::Route.url().as_bytes());
        put(&mut message, 5, b"12");
        put(&mut message, 6, b"gone");
        let mut framed = vec![0];
        framed.extend((message.len() as u32).to_be_bytes());
        framed.extend(message);
        framed
    }

    #[test]
    fn responses_are_read_in_pieces_of_any_size() {
        let two = [response(), response()].concat();
        for size in 1..two.len() {
            let keeps = size % 2 == 0;
            let mut scanner = Scanner::new(if keeps { two.len() as u64 / 2 - 5 } else { 16 });
            let mut read = Vec::new();
            for mut piece in two.chunks(size) {
                while !piece.is_empty() {
                    read.extend(scanner.feed(Form::Delta, &mut piece).unwrap());
                }
            }
            assert_eq!(read.len(), 2, "{size}");
            for response in read {
                assert_eq!((response.resources, response.removed), (3, 1), "{size}");
                assert_eq!((response.kind, &*response.nonce), (Some(Kind::Route), &b"12"[..]), "{size}");
                assert_eq!(response.bytes, two.len() as u64 / 2 - 5);
                assert_eq!(response.kept.len(), if keeps { 3 } else { 0 });
                assert_eq!(response.kept_removed, if keeps { vec![b"gone".to_vec()] } else { Vec::new() });
            }
        }
    }

    #[test]
    fn invalid_responses_are_refused() {
        for wrong in [
            &[1, 0, 0, 0, 0][..],
            &[0, 0, 0, 0, 2, 2 << 3 | 2, 9],
            &[0, 0, 0, 0, 1, 10],
            &[0, 0, 0, 0, 2, 3, 0],
        ] {
            let mut bytes = wrong;
            let mut scanner = Scanner::default();
            let mut failed = false;
            while !bytes.is_empty() && !failed {
                failed = scanner.feed(Form::Delta, &mut bytes).is_err();
            }
            let unfinished = scanner.in_message;
            assert!(failed || unfinished, "{wrong:?}");
        }
    }

    #[test]
    fn fields_are_found_by_their_path() {
        let mut inner = vec![1 << 3, 5];
        put(&mut inner, 2, b"one");
        put(&mut inner, 2, b"two");
        let mut outer = Vec::new();
        put(&mut outer, 3, &inner);
        put(&mut outer, 4, b"other");
        assert_eq!(at(&outer, &[3, 2]).unwrap(), [b"one", b"two"]);
        assert!(at(&outer, &[5]).unwrap().is_empty());
        assert!(at(&outer[..outer.len() - 1], &[3]).is_err());
    }
}
