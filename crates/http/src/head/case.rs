//! Spelling of header names as received, for peers of HTTP/1 that compare names with case.
//!
//! A head has names in lower case. Only where the configuration says so (`preserve_case`), it also keeps the names that
//! were received in another spelling. They replace the names of a head that is written, in place: spelling does not
//! change the length.

/// Names as received, each in its first spelling; those in lower case are left out.
#[derive(Clone, Debug, Default)]
pub(super) struct NameCase(Vec<Box<[u8]>>);

impl NameCase {
    /// Reads the names of a well-formed head; `None` if all are in lower case.
    pub(super) fn of(head: &[u8]) -> Option<Box<Self>> {
        let mut names = Self::default();
        for (start, end) in name_ranges(head) {
            let name = &head[start..end];
            if name.iter().any(u8::is_ascii_uppercase) && names.find(name).is_none() {
                names.0.push(name.into());
            }
        }
        (!names.0.is_empty()).then(|| Box::new(names))
    }

    /// Writes the received names over those of a well-formed head.
    pub(super) fn restore(&self, head: &mut [u8]) {
        let ranges: Vec<_> = name_ranges(head).collect();
        for (start, end) in ranges {
            if let Some(name) = self.find(&head[start..end]) {
                head[start..end].copy_from_slice(name);
            }
        }
    }

    fn find(&self, name: &[u8]) -> Option<&[u8]> {
        self.0.iter().map(|known| &**known).find(|known| known.eq_ignore_ascii_case(name))
    }
}

/// Returns the start and end of each name after the first line.
fn name_ranges(head: &[u8]) -> impl Iterator<Item = (usize, usize)> {
    let lines = memchr::memchr_iter(b'\n', head).map(|newline| newline + 1);
    lines.filter_map(|start| {
        let end = start + memchr::memchr2(b':', b'\r', &head[start..])?;
        (head[end] == b':').then_some((start, end))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_written_as_received() {
        let received = b"\r\nGET /A:B HTTP/1.1\r\nHost: A\r\nX-One: V\r\nx-two: V\r\nX-ONE: w\r\n\r\n";
        let names = NameCase::of(received).unwrap();
        let mut head =
            b"GET /A:B HTTP/1.1\r\nhost: A\r\nx-one: x-one\r\nx-two: V\r\nx-one: w\r\nx-new: 1\r\n\r\n"
                .to_vec();
        names.restore(&mut head);
        let expected =
            "GET /A:B HTTP/1.1\r\nHost: A\r\nX-One: x-one\r\nx-two: V\r\nX-One: w\r\nx-new: 1\r\n\r\n";
        assert_eq!(String::from_utf8(head).unwrap(), expected);
        assert!(NameCase::of(b"GET / HTTP/1.1\r\nhost: A\r\n\r\n").is_none());
        assert!(NameCase::of(b"HTTP/1.1 200 OK").is_none());
    }
}
