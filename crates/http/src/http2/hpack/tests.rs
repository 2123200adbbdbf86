use proptest::prelude::*;

use super::*;

fn hex(text: &str) -> Vec<u8> {
    let digits: Vec<_> = text.bytes().filter(|b| !b.is_ascii_whitespace()).collect();
    digits.chunks(2).map(|two| u8::from_str_radix(str::from_utf8(two).unwrap(), 16).unwrap()).collect()
}

fn fields(decoder: &mut Decoder, block: &[u8]) -> Result<Vec<String>, HpackError> {
    let mut all = Vec::new();
    decoder.decode(block, |name, value| {
        all.push(format!("{}: {}", String::from_utf8_lossy(name), String::from_utf8_lossy(value)));
    })?;
    Ok(all)
}

fn read(blocks: &[(&str, &[&str])], size: Option<usize>) {
    let mut decoder = Decoder::new();
    size.into_iter().for_each(|size| decoder.table.resize(size));
    for (block, expected) in blocks {
        assert_eq!(fields(&mut decoder, &hex(block)).unwrap(), *expected, "{block}");
    }
}

const FIRST: &[&str] = &[":method: GET", ":scheme: http", ":path: /", ":authority: www.example.com"];
const SECOND: &[&str] =
    &[":method: GET", ":scheme: http", ":path: /", ":authority: www.example.com", "cache-control: no-cache"];
const THIRD: &[&str] = &[
    ":method: GET",
    ":scheme: https",
    ":path: /index.html",
    ":authority: www.example.com",
    "custom-key: custom-value",
];

/// RFC 7541, appendix C.2.
#[test]
fn single_fields_of_the_rfc_are_decoded() {
    read(
        &[
            (
                "400a 6375 7374 6f6d 2d6b 6579 0d63 7573 746f 6d2d 6865 6164 6572",
                &["custom-key: custom-header"],
            ),
            ("040c 2f73 616d 706c 652f 7061 7468", &[":path: /sample/path"]),
            ("1008 7061 7373 776f 7264 0673 6563 7265 74", &["password: secret"]),
            ("82", &[":method: GET"]),
        ],
        None,
    );
}

/// RFC 7541, appendix C.3 and C.4.
#[test]
fn requests_of_the_rfc_are_decoded() {
    let plain: &[(&str, &[&str])] = &[
        ("8286 8441 0f77 7777 2e65 7861 6d70 6c65 2e63 6f6d", FIRST),
        ("8286 84be 5808 6e6f 2d63 6163 6865", SECOND),
        ("8287 85bf 400a 6375 7374 6f6d 2d6b 6579 0c63 7573 746f 6d2d 7661 6c75 65", THIRD),
    ];
    read(plain, None);
    let coded: &[(&str, &[&str])] = &[
        ("8286 8441 8cf1 e3c2 e5f2 3a6b a0ab 90f4 ff", FIRST),
        ("8286 84be 5886 a8eb 1064 9cbf", SECOND),
        ("8287 85bf 4088 25a8 49e9 5ba9 7d7f 8925 a849 e95b b8e8 b4bf", THIRD),
    ];
    read(coded, None);
}

/// RFC 7541, appendix C.5 and C.6: the table is so small that fields are evicted.
#[test]
fn responses_of_the_rfc_are_decoded() {
    let date = "date: Mon, 21 Oct 2013 20:13:21 GMT";
    let location = "location: https://www.example.com";
    let first: &[&str] = &[":status: 302", "cache-control: private", date, location];
    let second: &[&str] = &[":status: 307", "cache-control: private", date, location];
    let third: &[&str] = &[
        ":status: 200",
        "cache-control: private",
        "date: Mon, 21 Oct 2013 20:13:22 GMT",
        location,
        "content-encoding: gzip",
        "set-cookie: foo=ASDJKHQKBZXOQWEOPIUAXQWEOIU; max-age=3600; version=1",
    ];
    let plain: &[(&str, &[&str])] = &[
        (
            "4803 3330 3258 0770 7269 7661 7465 611d 4d6f 6e2c 2032 3120 4f63 7420 3230 3133 2032 303a 3133
             3a32 3120 474d 546e 1768 7474 7073 3a2f 2f77 7777 2e65 7861 6d70 6c65 2e63 6f6d",
            first,
        ),
        ("4803 3330 37c1 c0bf", second),
        (
            "88c1 611d 4d6f 6e2c 2032 3120 4f63 7420 3230 3133 2032 303a 3133 3a32 3220 474d 54c0 5a04 677a 6970
             7738 666f 6f3d 4153 444a 4b48 514b 425a 584f 5157 454f 5049 5541 5851 5745 4f49 553b 206d 6178 2d61
             6765 3d33 3630 303b 2076 6572 7369 6f6e 3d31",
            third,
        ),
    ];
    read(plain, Some(256));
    let coded: &[(&str, &[&str])] = &[
        (
            "4882 6402 5885 aec3 771a 4b61 96d0 7abe 9410 54d4 44a8 2005 9504 0b81 66e0 82a6 2d1b ff6e 919d 29ad
             1718 63c7 8f0b 97c8 e9ae 82ae 43d3",
            first,
        ),
        ("4883 640e ffc1 c0bf", second),
        (
            "88c1 6196 d07a be94 1054 d444 a820 0595 040b 8166 e084 a62d 1bff c05a 839b d9ab 77ad 94e7 821d d7f2
             e6c7 b335 dfdf cd5b 3960 d5af 2708 7f36 72c1 ab27 0fb5 291f 9587 3160 65c0 03ed 4ee5 b106 3d50 07",
            third,
        ),
    ];
    read(coded, Some(256));
}

#[test]
fn a_block_copies_few_names() {
    // A name of 4,000 bytes in the table, then fields with this name that are added to the table.
    let first = [&b"\x40\x7f\xa1\x1e"[..], &[b'a'; 4000], b"\0"].concat();
    let block = |count: usize| [&first[..], &b"\x7e\0".repeat(count)].concat();
    assert_eq!(fields(&mut Decoder::new(), &block(16)).map(|fields| fields.len()), Ok(17));
    assert_eq!(fields(&mut Decoder::new(), &block(17)), Err(HpackError));
}

#[test]
fn invalid_blocks_are_refused() {
    let bad = [
        "80",                      // index 0
        "be",                      // an unused index
        "ff ff ff ff ff 0f",       // an integer out of bounds
        "82 3f",                   // a truncated integer
        "82 20",                   // a size update after a field
        "3f e2 1f",                // a size of 4097
        "40 05 61",                // a truncated string
        "00 81 00 00",             // a Huffman string with invalid padding
        "7f ff ff ff ff ff ff 0f", // an index of a name out of bounds
    ];
    for block in bad {
        assert!(fields(&mut Decoder::new(), &hex(block)).is_err(), "{block}");
    }
}

#[test]
fn a_field_is_indexed_after_its_second_occurrence() {
    let (mut encoder, mut decoder) = (Encoder::new(), Decoder::new());
    let mut lengths = Vec::new();
    for _ in 0..4 {
        let mut out = Vec::new();
        encoder.field(&mut out, b"x-one", b"some value");
        assert_eq!(fields(&mut decoder, &out).unwrap(), ["x-one: some value"]);
        lengths.push(out.len());
    }
    assert_eq!(lengths[2..], [1, 1]);
    // Secrets are not added to the table. They are marked as never indexed.
    for _ in 0..4 {
        let mut out = Vec::new();
        encoder.field(&mut out, b"authorization", b"Bearer x");
        assert_eq!(out[0] & 0xf0, 0x10);
        assert_eq!(fields(&mut decoder, &out).unwrap(), ["authorization: Bearer x"]);
    }
}

#[test]
fn two_fields_with_the_same_slot_do_not_evict_each_other() {
    let mut encoder = Encoder::new();
    // With more names than slots, two share a slot.
    let names: Vec<String> = (0..=SEEN).map(|number| format!("x-{number}")).collect();
    let place = |name: &String| encoder.hash(name.as_bytes(), b"v").0;
    let (at, one) =
        names.iter().enumerate().find(|(at, a)| names[..*at].iter().any(|b| place(a) == place(b))).unwrap();
    let other = names[..at].iter().find(|other| place(other) == place(one)).unwrap();
    let mut lengths = Vec::new();
    for name in [one, other].repeat(3) {
        let mut out = Vec::new();
        encoder.field(&mut out, name.as_bytes(), b"v");
        lengths.push(out.len());
    }
    assert_eq!(lengths[4..], [1, 1], "{lengths:?}");
}

#[test]
fn the_peer_may_have_a_smaller_table() {
    let (mut encoder, mut decoder) = (Encoder::new(), Decoder::new());
    for size in [100, 0, 60, 4096, 1 << 20] {
        encoder.resize(size);
        for round in 0..20 {
            let mut out = Vec::new();
            encoder.begin(&mut out);
            let value = format!("{}", round % 3);
            encoder.field(&mut out, b"x-one", value.as_bytes());
            assert_eq!(fields(&mut decoder, &out).unwrap(), [format!("x-one: {value}")]);
            assert_eq!(decoder.table.max(), size.min(TABLE));
        }
    }
}

#[test]
fn the_static_table_is_searched_by_name() {
    for (name, _) in table::STATIC {
        let first = table::STATIC.iter().position(|(other, _)| *other == name).unwrap();
        assert_eq!(static_name(name.as_bytes()), Some(first + 1), "{name}");
    }
    assert_eq!(static_name(b"x-one"), None);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(30))]
    #[test]
    fn encoded_fields_are_decoded(
        heads in prop::collection::vec(
            prop::collection::vec(("[a-d]{1,3}|cookie|via|content-type", "[a-c]{0,2}|[a-z]{0,600}"), 0..12),
            0..24,
        ),
        sizes in prop::collection::vec(0..5000_usize, 24),
    ) {
        let (mut encoder, mut decoder) = (Encoder::new(), Decoder::new());
        for (head, size) in heads.iter().zip(sizes) {
            if size % 3 == 0 {
                encoder.resize(size);
            }
            let mut out = Vec::new();
            encoder.begin(&mut out);
            for (name, value) in head {
                encoder.field(&mut out, name.as_bytes(), value.as_bytes());
            }
            let expected: Vec<_> = head.iter().map(|(name, value)| format!("{name}: {value}")).collect();
            prop_assert_eq!(fields(&mut decoder, &out).unwrap(), expected);
        }
    }
}

proptest! {
    #[test]
    fn any_blocks_are_handled(blocks: Vec<Vec<u8>>) {
        let mut decoder = Decoder::new();
        for block in blocks {
            let _ = fields(&mut decoder, &block);
        }
    }
}
