//! Fuzzes `skysail_fuzz::format`.
#![no_main]
libfuzzer_sys::fuzz_target!(|data: &[u8]| skysail_fuzz::format(data));
