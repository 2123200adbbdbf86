//! The two tables of HPACK: the fixed one (RFC 7541, appendix A) and the one that both ends build as they go
//! (sections 2.3.2 and 4).

use std::collections::VecDeque;

/// What every entry counts for besides its bytes.
const OVERHEAD: usize = 32;

/// Fields that have come by, the latest first. Their bytes lie in one block, so that none is allocated alone.
#[derive(Default)]
pub(super) struct Table {
    /// Names and values, oldest first; what is before the oldest entry is waste.
    text: Vec<u8>,
    entries: VecDeque<Entry>,
    size: usize,
    max: usize,
    /// How many have ever been put in.
    inserted: u32,
}

#[derive(Clone, Copy)]
struct Entry {
    at: usize,
    name: usize,
    value: usize,
}

impl Entry {
    fn size(&self) -> usize {
        self.name + self.value + OVERHEAD
    }
}

/// Where a name comes from.
pub(super) enum Name<'a> {
    Index(usize),
    Text(&'a [u8]),
}

impl Table {
    /// An empty table of this size.
    pub(super) fn new(max: usize) -> Self {
        Self { max, ..Self::default() }
    }

    /// The size it may have.
    pub(super) fn max(&self) -> usize {
        self.max
    }

    /// Another size; what no longer fits goes.
    pub(super) fn resize(&mut self, max: usize) {
        self.max = max;
        self.evict(0);
    }

    /// The field at an index, which counts from 1 through the fixed table and on.
    pub(super) fn get(&self, index: usize) -> Option<(&[u8], &[u8])> {
        if let Some((name, value)) = STATIC.get(index.checked_sub(1)?) {
            return Some((name.as_bytes(), value.as_bytes()));
        }
        let entry = self.entry(index)?;
        let (name, value) = self.text.get(entry.at..)?.split_at_checked(entry.name)?;
        Some((name, value.get(..entry.value)?))
    }

    /// The entry at an index beyond the fixed table.
    fn entry(&self, index: usize) -> Option<Entry> {
        let latest = index.checked_sub(STATIC.len() + 1)?;
        self.entries.get(self.entries.len().checked_sub(latest + 1)?).copied()
    }

    /// Puts a field in, and gives its number. `None` if there is no such name.
    pub(super) fn insert(&mut self, name: Name<'_>, value: &[u8]) -> Option<u32> {
        let at = self.text.len();
        match name {
            Name::Text(text) => self.text.extend_from_slice(text),
            Name::Index(index) => match STATIC.get(index.checked_sub(1)?) {
                Some((text, _)) => self.text.extend_from_slice(text.as_bytes()),
                None => {
                    let entry = self.entry(index)?;
                    self.text.extend_from_within(entry.at..entry.at + entry.name);
                }
            },
        }
        let entry = Entry { at, name: self.text.len() - at, value: value.len() };
        self.inserted = self.inserted.wrapping_add(1);
        // One that is larger than the table empties it (section 4.4).
        self.evict(entry.size());
        if entry.size() <= self.max {
            self.text.extend_from_slice(value);
            self.size += entry.size();
            self.entries.push_back(entry);
        } else {
            self.text.truncate(at);
        }
        self.compact();
        Some(self.inserted)
    }

    /// The index of the field with this number, if it is still there.
    pub(super) fn index(&self, number: u32) -> Option<usize> {
        let latest = self.inserted.wrapping_sub(number) as usize;
        (latest < self.entries.len()).then(|| STATIC.len() + 1 + latest)
    }

    fn evict(&mut self, more: usize) {
        while self.size + more > self.max {
            let Some(oldest) = self.entries.pop_front() else { break };
            self.size -= oldest.size();
        }
    }

    /// Takes the waste away once it is more than the rest can be.
    fn compact(&mut self) {
        let waste = self.entries.front().map_or(self.text.len(), |oldest| oldest.at);
        if waste > self.max.max(1024) {
            self.text.drain(..waste);
            self.entries.iter_mut().for_each(|entry| entry.at -= waste);
        }
    }
}

/// The index of a name in the fixed table.
pub(super) fn static_name(name: &[u8]) -> Option<usize> {
    let alike = match name.len() {
        3 => [21, 60].as_slice(),
        4 => &[33, 34, 37, 38, 45, 59],
        5 => &[4, 22, 50],
        6 => &[19, 32, 35, 54],
        7 => &[2, 6, 8, 36, 51, 52],
        8 => &[39, 42, 46],
        10 => &[1, 55, 58],
        11 => &[53],
        12 => &[31, 47],
        13 => &[18, 23, 24, 30, 41, 44],
        14 => &[15, 28],
        15 => &[16, 17],
        16 => &[26, 27, 29, 61],
        17 => &[40, 57],
        18 => &[48],
        19 => &[25, 43, 49],
        25 => &[56],
        27 => &[20],
        _ => &[],
    };
    alike.iter().copied().find(|index| STATIC[index - 1].0.as_bytes() == name)
}

/// The fixed table.
pub(super) const STATIC: [(&str, &str); 61] = [
    (":authority", ""),
    (":method", "GET"),
    (":method", "POST"),
    (":path", "/"),
    (":path", "/index.html"),
    (":scheme", "http"),
    (":scheme", "https"),
    (":status", "200"),
    (":status", "204"),
    (":status", "206"),
    (":status", "304"),
    (":status", "400"),
    (":status", "404"),
    (":status", "500"),
    ("accept-charset", ""),
    ("accept-encoding", "gzip, deflate"),
    ("accept-language", ""),
    ("accept-ranges", ""),
    ("accept", ""),
    ("access-control-allow-origin", ""),
    ("age", ""),
    ("allow", ""),
    ("authorization", ""),
    ("cache-control", ""),
    ("content-disposition", ""),
    ("content-encoding", ""),
    ("content-language", ""),
    ("content-length", ""),
    ("content-location", ""),
    ("content-range", ""),
    ("content-type", ""),
    ("cookie", ""),
    ("date", ""),
    ("etag", ""),
    ("expect", ""),
    ("expires", ""),
    ("from", ""),
    ("host", ""),
    ("if-match", ""),
    ("if-modified-since", ""),
    ("if-none-match", ""),
    ("if-range", ""),
    ("if-unmodified-since", ""),
    ("last-modified", ""),
    ("link", ""),
    ("location", ""),
    ("max-forwards", ""),
    ("proxy-authenticate", ""),
    ("proxy-authorization", ""),
    ("range", ""),
    ("referer", ""),
    ("refresh", ""),
    ("retry-after", ""),
    ("server", ""),
    ("set-cookie", ""),
    ("strict-transport-security", ""),
    ("transfer-encoding", ""),
    ("user-agent", ""),
    ("vary", ""),
    ("via", ""),
    ("www-authenticate", ""),
];
