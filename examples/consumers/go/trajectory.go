package main

import (
	"encoding/binary"
	"fmt"
	"math"

	"github.com/vmihailenco/msgpack/v5"
)

// trajectory is a TrajectoryVerified with its packed numbers as lists; fields that this program does not know are kept.
func trajectory(data []byte) (map[string]any, error) {
	var fact map[string]any
	if err := msgpack.Unmarshal(data, &fact); err != nil {
		return nil, err
	}
	sequences, ok := fact["sequences"].([]any)
	if !ok {
		return nil, fmt.Errorf("%v is no trajectory", fact["fact"])
	}
	for _, each := range sequences {
		sequence, _ := each.(map[string]any)
		ids, here := sequence["ids"].([]byte)
		logprobs, too := sequence["logprobs"].([]byte)
		if !here || !too {
			return nil, fmt.Errorf("a sequence without packed numbers: %v", each)
		}
		sequence["ids"] = numbers(ids, func(bits uint32) int32 { return int32(bits) })
		// As wide as JSON's numbers: the digits that are printed are then the value's own.
		sequence["logprobs"] = numbers(logprobs, func(bits uint32) float64 { return float64(math.Float32frombits(bits)) })
	}
	return fact, nil
}

// numbers are packed little-endian, 4 bytes each.
func numbers[N int32 | float64](packed []byte, of func(bits uint32) N) []N {
	list := make([]N, 0, len(packed)/4)
	for ; len(packed) >= 4; packed = packed[4:] {
		list = append(list, of(binary.LittleEndian.Uint32(packed)))
	}
	return list
}
