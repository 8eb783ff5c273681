package vmmbench

import (
	"context"
	"encoding/json"
	"os"
	"testing"
)

func TestScratch(t *testing.T) {
	r, err := Run(context.Background(), Options{Program: os.Getenv("VMM"), Runs: 3, Progress: func(s string) { t.Log(s) }})
	if err != nil {
		t.Fatal(err)
	}
	b, _ := json.Marshal(r)
	t.Log(string(b))
}
